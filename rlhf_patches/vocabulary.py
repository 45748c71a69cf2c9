"""What a patch is: immutable data, cheap to import, no behaviour beyond checking itself.

A patch names the code that it repairs as ``module:qualified.name`` and never imports it. Implementations
are named the same way and are imported only when their target is patched, so that listing patches never
imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Union

__all__ = ["Change", "DefinitionError", "Guard", "Patch", "Replace", "Rewrite", "Wrap"]

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_METAVARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


class DefinitionError(ValueError):
    """A patch is described wrongly; the message says which field, what was expected and what to write."""


def _check_path(path: str, what: str) -> None:
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise DefinitionError(f"{what} is {path!r}: expected 'module:qualified.name', such as 'pkg.mod:Class.method'")


@dataclass(frozen=True)
class Guard:
    """The version guard; the shape guard is part of each change, and both must hold.

    ``distribution`` is the name on PyPI (``megatron-core``), ``versions`` a PEP 440 specifier of the
    releases that have the defect (``>=0.9.0,<0.17``; pre-releases count). An empty specifier means every
    version.
    """

    distribution: str
    versions: str

    def __post_init__(self) -> None:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        if not self.distribution:
            raise DefinitionError("Guard.distribution is empty: expected the framework's name on PyPI")
        try:
            SpecifierSet(self.versions)
        except InvalidSpecifier as error:
            raise DefinitionError(
                f"Guard.versions is {self.versions!r}: expected a PEP 440 specifier such as '>=0.9.0,<0.17' ({error})"
            ) from error

    def __str__(self) -> str:
        return f"{self.distribution} {self.versions}".rstrip()


@dataclass(frozen=True)
class Rewrite:
    """Edit one function's source: ``pattern`` becomes ``replacement``, wherever it occurs in the function.

    Patterns are ast-grep's (``$NAME`` matches one node). The pattern is the shape guard: it must occur
    exactly ``matches`` times in the function. ``inside`` is a pattern that the matched node's parent must
    have (an ``is None`` test counts only within an ``assert``, say). Every pattern in ``alongside`` must occur
    in the function too: it names the surrounding code that makes the repair right.

    In ``replacement``, ``$NAME`` stands for what the pattern's metavariable matched, or for an object listed in
    ``uses`` (name -> ``module:qualified.name``), which is imported where it is used, so that nothing is put
    into the framework's namespace. Match the smallest node: the line count of the file never changes.
    """

    target: str
    pattern: str
    replacement: str
    matches: int = 1
    inside: str | None = None
    alongside: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    uses: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_path(self.target, "Rewrite.target")
        if not self.pattern.strip():
            raise DefinitionError("Rewrite.pattern is empty: expected an ast-grep pattern")
        for name in ("alongside", "unless"):
            if isinstance(getattr(self, name), str):
                raise DefinitionError(f"Rewrite.{name} is a string: expected a tuple of patterns")
        if self.matches < 1:
            raise DefinitionError(f"Rewrite.matches is {self.matches}: expected the number of occurrences, 1 or more")
        for name, path in self.uses.items():
            if not _METAVARIABLE.fullmatch(name):
                raise DefinitionError(f"Rewrite.uses has the name {name!r}: expected capitals, as in a metavariable")
            _check_path(path, f"Rewrite.uses[{name!r}]")
        object.__setattr__(self, "uses", MappingProxyType(dict(self.uses)))

    def __reduce__(self) -> tuple[object, ...]:
        # The read-only view cannot be pickled, and Ray pickles what it sends to workers.
        values = [getattr(self, field.name) for field in fields(self)]
        return Rewrite, (*values[:-1], dict(self.uses))


@dataclass(frozen=True)
class Replace:
    """Replace a whole function by ``implementation``, which is called with the caller's arguments.

    The shape guard is ``fingerprints``: those of the upstream function in every release that was read
    (`rlhf_patches.fingerprint` computes them).
    """

    target: str
    implementation: str
    fingerprints: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_path(self.target, "Replace.target")
        _check_path(self.implementation, "Replace.implementation")
        if not self.fingerprints or isinstance(self.fingerprints, str):
            raise DefinitionError("Replace.fingerprints is empty or a string: expected a tuple of fingerprints")


@dataclass(frozen=True)
class Wrap:
    """Put ``implementation`` around a function, in wrapt's convention: ``(wrapped, instance, args, kwargs)``.

    ``wrapped`` is the original, bound to ``instance`` where the target is a method (``instance`` is the class
    for a class method and None for functions and static methods). ``args`` holds every positional parameter with
    defaults filled in, ``kwargs`` the keyword-only ones.

    The shape guard is ``fingerprints``, as for `Replace`; or ``signature`` (such as ``"(self, x, *, y=0)"``,
    annotations left out) with ``signature_suffices``, the reason why the body does not matter.
    """

    target: str
    implementation: str
    fingerprints: tuple[str, ...] = ()
    signature: str | None = None
    signature_suffices: str | None = None

    def __post_init__(self) -> None:
        _check_path(self.target, "Wrap.target")
        _check_path(self.implementation, "Wrap.implementation")
        if isinstance(self.fingerprints, str):
            raise DefinitionError("Wrap.fingerprints is a string: expected a tuple of fingerprints")
        by_signature = bool(self.signature and self.signature_suffices)
        if bool(self.signature) != bool(self.signature_suffices) or bool(self.fingerprints) == by_signature:
            raise DefinitionError(
                f"Wrap of {self.target} needs a shape guard: either fingerprints, or signature together with "
                "signature_suffices (the reason why the body does not matter)"
            )


Change = Union[Rewrite, Replace, Wrap]


@dataclass(frozen=True)
class Patch:
    """One known bug and its repair. Documentation pages and CLI texts are generated from these fields.

    Attributes:
        name: kebab-case, framework first: ``megatron-forward-pre-hook-reentry``.
        summary: one line.
        symptom: what a user sees, error message included, so that a search for it finds this patch.
        cause: why upstream does that (Markdown).
        repair: what the patch changes, and what it leaves alone (Markdown).
        references: addresses of upstream issues and pull requests.
        guard: the releases that have the defect.
        changes: applied all or not at all.
        retire: when this patch can be removed.
        observations: ``module:function``, which says what the patch has done so far in this process, as a
            dictionary of plain values (``{"backward in place": 3}``); reports show it. Called only if something
            else has imported the module, so it belongs to the module of the implementation, or near it.
    """

    name: str
    summary: str
    symptom: str
    cause: str
    repair: str
    references: tuple[str, ...]
    guard: Guard
    changes: tuple[Change, ...]
    retire: str
    observations: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise DefinitionError(f"Patch.name is {self.name!r}: expected kebab-case, framework first ('trl-some-bug')")
        for text in ("summary", "symptom", "cause", "repair", "retire"):
            if not getattr(self, text).strip():
                raise DefinitionError(f"Patch {self.name}: {text} is empty; users read it, so write it")
        if "\n" in self.summary:
            raise DefinitionError(f"Patch {self.name}: summary has several lines; expected one")
        for name, kind in (("references", str), ("changes", (Rewrite, Replace, Wrap))):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not value or not all(isinstance(item, kind) for item in value):
                raise DefinitionError(f"Patch {self.name}: {name} is {value!r}; expected a tuple with one item or more")
        if not isinstance(self.guard, Guard):
            raise DefinitionError(f"Patch {self.name}: guard is {self.guard!r}; expected a Guard")
        if self.observations is not None:
            _check_path(self.observations, f"Patch {self.name}: observations")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that must have been imported before this patch can be applied, in the order of the changes."""
        return tuple(dict.fromkeys(change.target.partition(":")[0] for change in self.changes))

    @property
    def implementations(self) -> tuple[str, ...]:
        """What the changes put to use, as ``module:qualified.name``, in the order of the changes."""
        paths: list[str] = []
        for change in self.changes:
            paths += change.uses.values() if isinstance(change, Rewrite) else [change.implementation]
        return tuple(paths)
