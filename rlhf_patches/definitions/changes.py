"""The changes of a patch to one function, and the shapes of an advice; each with its shape guard."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Union

from .checks import check_path, check_types, names_fields, of_a_module, shown
from .errors import DefinitionError

_IMPORT = re.compile(r"from [^\W\d]\w*(\.[^\W\d]\w*)* import [^\W\d]\w*")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_METAVARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


def _freeze(change: object, name: str) -> None:
    """Replace a mapping by a read-only copy."""
    object.__setattr__(change, name, MappingProxyType(dict(getattr(change, name))))


def _reduce(change: Any) -> tuple[object, ...]:
    # A read-only view cannot be pickled, and Ray pickles what it sends to workers.
    values = [getattr(change, field.name) for field in fields(change)]
    return type(change), tuple(dict(value) if isinstance(value, MappingProxyType) else value for value in values)


def _check_fingerprints(change: Replace | Wrap) -> None:
    kind, fingerprints = type(change).__name__, change.fingerprints
    if not isinstance(fingerprints, Mapping):
        raise DefinitionError(
            f"{kind}.fingerprints is {shown(fingerprints)}: "
            "expected a dictionary, from each fingerprint to the releases with it"
        )
    for fingerprint, releases in fingerprints.items():
        if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
            raise DefinitionError(f"{kind}.fingerprints has {shown(fingerprint)}: expected 16 hex digits")
        if not isinstance(releases, str) or not releases.strip():
            raise DefinitionError(
                f"{kind}.fingerprints[{fingerprint!r}] is {shown(releases)}: "
                "expected the releases that have it, as text"
            )


@names_fields
@dataclass(frozen=True)
class Rewrite:
    """Edit one function's source: replace each occurrence of ``pattern`` in the function by ``replacement``.

    Match the smallest node: the file's number of lines never changes. ``pattern``, ``matches``, ``inside``,
    ``alongside`` and ``unless`` together are the shape guard.

    Attributes:
        target: the function, ``module:qualified.name``.
        pattern: an ast-grep pattern; ``$NAME`` matches one node, ``$$$NAME`` any number of them.
        replacement: the new text. ``$NAME`` is the match of the pattern's metavariable, or an object of ``uses``.
        matches: the exact number of occurrences in the function.
        inside: a pattern that the matched node's parent must match (for example, an ``is None`` test only within an
            ``assert``); None for any parent.
        alongside: patterns that must also occur in the function: the surrounding code that the repair requires.
        unless: patterns that must not occur in the function: the repair of a later release.
        uses: metavariables of the replacement, each with an object, ``module:qualified.name``. The object is imported
            at its use, so the framework's namespace does not change.
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
        _check_shape(self)
        for name, path in self.uses.items():
            if not isinstance(name, str) or not _METAVARIABLE.fullmatch(name):
                raise DefinitionError(f"Rewrite.uses has the name {name!r}: expected capitals, as in a metavariable")
            check_path(path, f"Rewrite.uses[{name!r}]")
        _freeze(self, "uses")

    __reduce__ = _reduce


@names_fields
@dataclass(frozen=True)
class Replace:
    """Replace a whole function by another.

    Attributes:
        target: the function, ``module:qualified.name``.
        implementation: the function that is called instead, with the caller's arguments, ``module:qualified.name``. It
            must accept the parameters of the target.
        fingerprints: the shape guard: the fingerprints of the upstream function in every reviewed release, each with
            the releases that have it (`rlhf_patches.fingerprint` computes them).
    """

    target: str
    implementation: str
    fingerprints: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        check_path(self.target, "Replace.target")
        check_path(self.implementation, "Replace.implementation")
        _check_fingerprints(self)
        if not self.fingerprints:
            raise DefinitionError("Replace.fingerprints is empty: expected those of the reviewed releases")
        _freeze(self, "fingerprints")

    __reduce__ = _reduce


@names_fields
@dataclass(frozen=True)
class Wrap:
    """Wrap a function with ``implementation``, in wrapt's convention: ``(wrapped, instance, args, kwargs)``.

    ``wrapped`` is the original, bound to ``instance`` if the target is a method (``instance`` is the class for a class
    method and None for functions and static methods). ``args`` holds every positional parameter with defaults filled
    in, ``kwargs`` the keyword-only ones.

    The shape guard is either ``fingerprints``, or ``signature`` together with ``signature_suffices``.

    Attributes:
        target: the function, ``module:qualified.name``.
        implementation: the wrapper, ``module:qualified.name``.
        fingerprints: as for `Replace`; empty if the signature suffices.
        signature: the target's parameters as text, without annotations, such as ``"(self, x, *, y=0)"``.
        signature_suffices: the reason why the body does not matter.
    """

    target: str
    implementation: str
    fingerprints: Mapping[str, str] = field(default_factory=dict, hash=False)
    signature: str | None = None
    signature_suffices: str | None = None

    def __post_init__(self) -> None:
        check_path(self.target, "Wrap.target")
        check_path(self.implementation, "Wrap.implementation")
        _check_fingerprints(self)
        check_types(self, f"Wrap of {self.target}: ")
        by_signature = bool(self.signature and self.signature_suffices)
        if bool(self.signature) != bool(self.signature_suffices) or bool(self.fingerprints) == by_signature:
            raise DefinitionError(
                f"Wrap of {self.target} needs a shape guard: either fingerprints, or signature together with "
                "signature_suffices (the reason why the body does not matter)"
            )
        _freeze(self, "fingerprints")

    __reduce__ = _reduce


@names_fields
@dataclass(frozen=True)
class Shape:
    """The shape of one function's source that has the bug, for an `Advice`, which changes nothing.

    For a module whose import fails if the other package lacks a name: ``module:<module>``, with only the pattern
    ``from X import name``. It is searched in the statements that run on every import of the module, whatever other
    names the statement imports.

    Attributes:
        target, pattern, matches, inside, alongside, unless: as in `Rewrite`.
    """

    target: str
    pattern: str
    matches: int = 1
    inside: str | None = None
    alongside: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.of_a_module:
            _check_shape(self)
            return
        check_types(self, f"Shape of {self.target}: ")
        if not _IMPORT.fullmatch(self.pattern):
            raise DefinitionError(f"Shape of {self.target}: {shown(self.pattern)}; expected 'from X import name'")
        if (self.matches, self.inside, self.alongside, self.unless) != (1, None, (), ()):
            raise DefinitionError(f"Shape of {self.target} has more than a pattern; expected only a pattern")

    @property
    def of_a_module(self) -> bool:
        """Whether it describes a statement of a module, not of a function."""
        return of_a_module(self.target)


def _check_shape(change: Rewrite | Shape) -> None:
    kind = type(change).__name__
    check_path(change.target, f"{kind}.target")
    check_types(change, f"{kind} of {change.target}: ")
    if not change.pattern.strip():
        raise DefinitionError(f"{kind}.pattern is empty: expected an ast-grep pattern")
    if change.matches < 1:
        raise DefinitionError(f"{kind}.matches is {change.matches}: expected the number of occurrences, 1 or more")


Change = Union[Rewrite, Replace, Wrap, Shape]


def put_to_use(changes: Iterable[Change]) -> tuple[str, ...]:
    """Return the objects that changes use, as ``module:qualified.name``, in order and without repetition."""
    paths: dict[str, None] = {}
    for change in changes:
        if isinstance(change, Rewrite):
            paths |= dict.fromkeys(change.uses.values())
        elif not isinstance(change, Shape):
            paths[change.implementation] = None
    return tuple(paths)
