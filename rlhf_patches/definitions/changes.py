"""What a patch does to one function, and what an advice finds in it; each with its shape guard."""

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
    """Put a read-only copy of a mapping into its place."""
    object.__setattr__(change, name, MappingProxyType(dict(getattr(change, name))))


def _reduce(change: Any) -> tuple[object, ...]:
    # A read-only view cannot be pickled, and Ray pickles what it sends to workers.
    values = [getattr(change, field.name) for field in fields(change)]
    return type(change), tuple(dict(value) if isinstance(value, MappingProxyType) else value for value in values)


def _check_fingerprints(change: Replace | Wrap) -> None:
    kind, found = type(change).__name__, change.fingerprints
    if not isinstance(found, Mapping):
        raise DefinitionError(
            f"{kind}.fingerprints is {shown(found)}: "
            "expected a dictionary, from each fingerprint to the releases with it"
        )
    for fingerprint, releases in found.items():
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
    """Edit one function's source: ``pattern`` becomes ``replacement``, wherever it occurs in the function.

    Match the smallest node: the line count of the file never changes. ``pattern``, ``matches``, ``inside``,
    ``alongside`` and ``unless`` together are the shape guard.

    Attributes:
        target: the function, ``module:qualified.name``.
        pattern: an ast-grep pattern; ``$NAME`` matches one node, ``$$$NAME`` any number of them.
        replacement: the new text. ``$NAME`` stands for what the pattern's metavariable matched, or for an object of
            ``uses``.
        matches: how often the pattern occurs in the function, exactly.
        inside: a pattern that the matched node's parent must have (an ``is None`` test counts only within an
            ``assert``, say); None for any parent.
        alongside: patterns that must occur in the function too: the surrounding code that makes the repair right.
        unless: patterns that must not occur in the function: the repair, as a later release has it.
        uses: metavariables of the replacement, each with an object, ``module:qualified.name``. It is imported where it
            is used, so that nothing is put into the framework's namespace.
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
        implementation: what is called instead, with the caller's arguments, ``module:qualified.name``. It must take the
            parameters of the target.
        fingerprints: the shape guard. The fingerprints of the upstream function in every release that was read, each
            with the releases that have it (`rlhf_patches.fingerprint` computes them).
    """

    target: str
    implementation: str
    fingerprints: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        check_path(self.target, "Replace.target")
        check_path(self.implementation, "Replace.implementation")
        _check_fingerprints(self)
        if not self.fingerprints:
            raise DefinitionError("Replace.fingerprints is empty: expected those of the releases that were read")
        _freeze(self, "fingerprints")

    __reduce__ = _reduce


@names_fields
@dataclass(frozen=True)
class Wrap:
    """Put ``implementation`` around a function, in wrapt's convention: ``(wrapped, instance, args, kwargs)``.

    ``wrapped`` is the original, bound to ``instance`` where the target is a method (``instance`` is the class
    for a class method and None for functions and static methods). ``args`` holds every positional parameter with
    defaults filled in, ``kwargs`` the keyword-only ones.

    The shape guard is either ``fingerprints``, or ``signature`` together with ``signature_suffices``.

    Attributes:
        target: the function, ``module:qualified.name``.
        implementation: what is called, ``module:qualified.name``.
        fingerprints: as for `Replace`; empty where the signature suffices.
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
    """What one function's source looks like where it has the bug; of an `Advice`, which changes nothing.

    Of a module, whose import fails where the other package does not have a name: ``module:<module>``, with the pattern
    ``from X import name`` and nothing else. It is looked for among what runs whenever the module is imported, as
    Python reads it, however many names the statement has.

    Attributes:
        target, pattern, matches, inside, alongside, unless: as those of `Rewrite`.
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
            raise DefinitionError(f"Shape of {self.target} has more than a pattern; expected nothing else of a module")

    @property
    def of_a_module(self) -> bool:
        """Whether it is a statement of a module, not of a function."""
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
    """What changes put to use, as ``module:qualified.name``, in their order, each once."""
    paths: dict[str, None] = {}
    for change in changes:
        if isinstance(change, Rewrite):
            paths |= dict.fromkeys(change.uses.values())
        elif not isinstance(change, Shape):
            paths[change.implementation] = None
    return tuple(paths)
