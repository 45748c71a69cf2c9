"""What a patch is, an advice and a watch: immutable data, cheap to import, no behaviour beyond checking itself.

A patch names the code that it repairs as ``module:qualified.name`` and never imports it. Implementations
are named the same way and are imported only when their target is patched, so that listing patches never
imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union

from . import ranges
from .errors import DefinitionError
from .listed import ADVICE, PATCH, WATCH, Listed, ListedBeside, ListedVariant, modules_of, range_of, ranges_of, told

if TYPE_CHECKING:
    from packaging.version import Version

_Kind = TypeVar("_Kind", bound=type)

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
MODULE = "<module>"
"""What Python calls the code of a module, in tracebacks too: ``module:<module>``."""
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_OF_A_MODULE = re.compile(rf"[^\W\d]\w*(\.[^\W\d]\w*)*:{MODULE}")
_IMPORT = re.compile(r"from [^\W\d]\w*(\.[^\W\d]\w*)* import [^\W\d]\w*")
_PACKAGE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_SETTING = re.compile(r"[a-z_][\w.]*=[^\s|=A-Z]+(?:\|[^\s|=A-Z]+)*")
_METAVARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


def check_name(name: object, what: str) -> None:
    """Check the name of a patch or an advice; ``what`` is what the message calls it.

    Raises:
        DefinitionError: it is not kebab-case.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DefinitionError(
            f"{what} is {_shown(name)}: expected kebab-case, framework first, two words at least ('trl-some-bug')"
        )


def _check_path(path: str, what: str) -> None:
    if not isinstance(path, str) or not _PATH.fullmatch(path):
        raise DefinitionError(
            f"{what} is {_shown(path)}: expected 'module:qualified.name', such as 'pkg.mod:Class.method'"
        )


_LONGEST = 100  # characters of a wrong value in a message


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "text"),
    "str | None": (lambda value: value is None or isinstance(value, str), "text, or None"),
    "int": (lambda value: type(value) is int, "a whole number"),
    "bool": (lambda value: type(value) is bool, "True or False"),
    "tuple[str, ...]": (
        lambda value: isinstance(value, tuple) and all(isinstance(item, str) for item in value),
        "a tuple of strings, ('one',) say",
    ),
    "Mapping[str, str]": (
        lambda value: isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values()),
        "a dictionary of strings",
    ),
}
"""How a field is annotated, what holds of its values, and how to say so. Fields of other types are checked by name."""


def _check_types(described: Any, owner: str) -> None:
    for each in fields(described):
        holds, expected = _TYPES.get(str(each.type), (None, ""))
        value = getattr(described, each.name)
        if holds is not None and not holds(value):
            raise DefinitionError(f"{owner}{each.name} is {_shown(value)}: expected {expected}")


def _names_fields(kind: _Kind) -> _Kind:
    """Decorates a dataclass: fields that are missing or unknown are a `DefinitionError`, which names the patch."""
    make = kind.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def init(self: object, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
        except TypeError as error:
            wrong = _wrong_fields(kind, args, kwargs)
            if not wrong:
                raise
            raise DefinitionError(wrong) from error

    kind.__init__ = init  # type: ignore[misc]
    return kind


def _wrong_fields(kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    names = [each.name for each in fields(kind)]
    given = dict(zip(names, args, strict=False)) | kwargs
    owner = f"{kind.__name__} {given.get('name', given.get('target', ''))}".rstrip()
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    missing = [name for name in needed if name not in given]
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        others = [name for name in names if name not in given]
        return f"{owner} has no field {unknown[0]!r}; expected one of {', '.join(others)}"
    if len(args) > len(names):
        return f"{owner} has {len(names)} fields ({', '.join(names)}), and {len(args)} values"
    if missing:
        return f"{owner} lacks {', '.join(missing)}"
    return next((f"{owner} has {name} twice" for name in names[: len(args)] if name in kwargs), "")


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
            f"{kind}.fingerprints is {_shown(found)}: "
            "expected a dictionary, from each fingerprint to the releases with it"
        )
    for fingerprint, releases in found.items():
        if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
            raise DefinitionError(f"{kind}.fingerprints has {_shown(fingerprint)}: expected 16 hex digits")
        if not isinstance(releases, str) or not releases.strip():
            raise DefinitionError(
                f"{kind}.fingerprints[{fingerprint!r}] is {_shown(releases)}: "
                "expected the releases that have it, as text"
            )


OLDER, NEWER = "0.0.0.0.1.dev0", "99999"
"""Versions before and after every release."""


@functools.cache
def _around(base: str) -> tuple[Version, ...]:
    """A version, and those right before and after it."""
    from packaging.version import Version

    found = []
    for text in (base, f"{base}.0.0.0.1", f"{base}.post1", f"{base}.dev1"):
        with contextlib.suppress(ValueError):  # 1.0.post1.post1
            found.append(Version(text))
    return tuple(found)


@_names_fields
@dataclass(frozen=True)
class Beside:
    """Another distribution, and the versions of it beside which the guarded one has the defect: releases that do not
    work together. The code of the guarded one tells nothing of it.

    Attributes:
        distribution: its name on PyPI, such as ``transformers``.
        versions: as those of a `Guard`.
        package: what is imported of it, to tell whether the metadata belong to it; if empty, its name in Python.
    """

    distribution: str
    versions: str
    package: str = ""

    def __post_init__(self) -> None:
        _check_types(self, "Beside.")
        if not self.distribution:
            raise DefinitionError("Beside.distribution is empty: expected the other package's name on PyPI")
        if not self.versions.strip():
            raise DefinitionError("Beside.versions is empty: expected those beside which the defect shows, '>=5.1' say")
        ranges.check(self.versions, "Beside")
        if not self.package:
            object.__setattr__(self, "package", self.distribution.lower().replace("-", "_"))
        if not _PACKAGE.fullmatch(self.package):
            raise DefinitionError(f"Beside.package is {_shown(self.package)}: expected what is imported, 'trl' say")

    def __str__(self) -> str:
        return told(self)

    def listed(self) -> ListedBeside:
        """Its part of the variant's entry in a list."""
        return ListedBeside(self.distribution, self.versions, self.package)


@_names_fields
@dataclass(frozen=True)
class Guard:
    """The version guard; the shape guard is part of each change, and both must hold.

    Attributes:
        distribution: the framework's name on PyPI, such as ``megatron-core``.
        versions: a PEP 440 specifier of the releases that have the defect, such as ``>=0.9.0,<0.17``; pre-releases
            count. An empty one means every version.
        may_be_missing: why such a release may come without the patched modules (a part of the framework that only some
            copies have); the patch is then absent. Without this text it is refused.
        beside: another distribution, of which such a version has to be there too; None where it does not matter.
    """

    distribution: str
    versions: str
    may_be_missing: str | None = None
    beside: Beside | None = None

    def __post_init__(self) -> None:
        _check_types(self, "Guard.")
        if not isinstance(self.beside, (Beside, type(None))):
            raise DefinitionError(f"Guard.beside is {_shown(self.beside)}: expected a Beside, or None")
        if self.beside is not None and self.beside.distribution == self.distribution:
            raise DefinitionError(f"Guard.beside is {self.distribution} too: expected another distribution")
        if not self.distribution:
            raise DefinitionError("Guard.distribution is empty: expected the framework's name on PyPI")
        ranges.check(self.versions)
        if self.may_be_missing is not None and not self.may_be_missing.strip():
            raise DefinitionError("Guard.may_be_missing is empty: expected the reason, or None")

    def __str__(self) -> str:
        return f"{self.distribution} {range_of(self)}".rstrip()

    def shares_a_version_with(self, other: Guard) -> str | None:
        """A version that is in both ranges; None where there is none.

        Membership changes at the versions that the ranges name only, so those, and one right after each, tell all.
        """
        if ranges.plainly_apart(self.versions, other.versions):
            return None
        both = [ranges.parsed(guard.versions) for guard in (self, other)]
        named = {pin.version.removesuffix(".*") for each in both for pin in each}
        for base in [*sorted(named), OLDER, NEWER]:
            for candidate in _around(base):
                if all(each.contains(candidate, prereleases=True) for each in both):
                    return str(candidate)
        return None


@_names_fields
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
            _check_path(path, f"Rewrite.uses[{name!r}]")
        _freeze(self, "uses")

    __reduce__ = _reduce


@_names_fields
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
        _check_path(self.target, "Replace.target")
        _check_path(self.implementation, "Replace.implementation")
        _check_fingerprints(self)
        if not self.fingerprints:
            raise DefinitionError("Replace.fingerprints is empty: expected those of the releases that were read")
        _freeze(self, "fingerprints")

    __reduce__ = _reduce


@_names_fields
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
        _check_path(self.target, "Wrap.target")
        _check_path(self.implementation, "Wrap.implementation")
        _check_fingerprints(self)
        _check_types(self, f"Wrap of {self.target}: ")
        by_signature = bool(self.signature and self.signature_suffices)
        if bool(self.signature) != bool(self.signature_suffices) or bool(self.fingerprints) == by_signature:
            raise DefinitionError(
                f"Wrap of {self.target} needs a shape guard: either fingerprints, or signature together with "
                "signature_suffices (the reason why the body does not matter)"
            )
        _freeze(self, "fingerprints")

    __reduce__ = _reduce


@_names_fields
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
        _check_types(self, f"Shape of {self.target}: ")
        if not _IMPORT.fullmatch(self.pattern):
            raise DefinitionError(f"Shape of {self.target}: {_shown(self.pattern)}; expected 'from X import name'")
        if (self.matches, self.inside, self.alongside, self.unless) != (1, None, (), ()):
            raise DefinitionError(f"Shape of {self.target} has more than a pattern; expected nothing else of a module")

    @property
    def of_a_module(self) -> bool:
        """Whether it is a statement of a module, not of a function."""
        return isinstance(self.target, str) and _OF_A_MODULE.fullmatch(self.target) is not None


def _check_shape(change: Rewrite | Shape) -> None:
    kind = type(change).__name__
    _check_path(change.target, f"{kind}.target")
    _check_types(change, f"{kind} of {change.target}: ")
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


@_names_fields
@dataclass(frozen=True)
class Condition:
    """When a bug bites in a call of a function, told from the call's arguments alone: reports say how often it did.

    Attributes:
        target: the function, of one of the changes.
        tells: ``module:qualified.name``, which takes parameters of the target by their names and returns whether the
            bug's condition holds in this call: False, True, or by how much, a number; None where that cannot be told.
            It is called in every call of the target, so it reads attributes and shapes, never a tensor's values (which
            wait for a GPU), and changes nothing. Empty where the repair alone can tell (`rlhf_patches.decided`).
        measure: what the number is, before it: ``divisor x``.
    """

    target: str
    tells: str = ""
    measure: str = ""

    def __post_init__(self) -> None:
        _check_types(self, "Condition.")
        _check_path(self.target, "Condition.target")
        if self.tells:
            _check_path(self.tells, "Condition.tells")


@_names_fields
@dataclass(frozen=True)
class Variant:
    """One shape of upstream's code that has the bug, and its repair in it.

    Attributes:
        guard: the releases whose code has the bug in this shape.
        changes: applied all or not at all, once all their modules have been imported. Of an `Advice` shapes alone, all
            of which must be there.
        independent: whether the changes of each module do without those of the others. They are then applied when that
            module is imported, whichever others are or are not; no module's if any is not recognised.
        where_defined, unless_defined: functions, ``module:name``, all of which have to be defined in the changes' own
            modules, and of which none may be: for code that reads the same where what it stands on is another.
    """

    guard: Guard
    changes: tuple[Change, ...]
    independent: bool = False
    where_defined: tuple[str, ...] = ()
    unless_defined: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.guard, Guard):
            raise DefinitionError(f"Variant.guard is {_shown(self.guard)}; expected a Guard")
        _check_types(self, "Variant.")
        _check_items(f"Variant of {self.guard}", "changes", self.changes, (Rewrite, Replace, Wrap, Shape))
        if len({isinstance(change, Shape) for change in self.changes}) > 1:
            raise DefinitionError("Variant.changes has a Shape beside other changes; expected shapes alone, or none")
        for name, path in (
            *(("where_defined", path) for path in self.where_defined),
            *(("unless_defined", path) for path in self.unless_defined),
        ):
            _check_path(path, f"Variant.{name}")
            if path.partition(":")[0] not in self.modules:
                raise DefinitionError(
                    f"Variant.{name} names {path}: expected functions of what it changes, {', '.join(self.modules)}"
                )

    @property
    def is_advice(self) -> bool:
        """Whether it changes nothing: that of an `Advice`."""
        return isinstance(self.changes[0], Shape)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that must have been imported before it can be applied, in the order of the changes."""
        return tuple(dict.fromkeys(change.target.partition(":")[0] for change in self.changes))

    @property
    def rewrites(self) -> bool:
        """Whether a change is a pattern: a `Rewrite`, or a `Shape`."""
        return any(isinstance(change, (Rewrite, Shape)) for change in self.changes)

    def listed(self) -> ListedVariant:
        """Its part of the patch's entry in a list."""
        guard = self.guard
        return ListedVariant(
            distribution=guard.distribution,
            versions=guard.versions,
            modules=self.modules,
            independent=self.independent,
            rewrites=self.rewrites,
            may_be_missing=guard.may_be_missing,
            is_advice=self.is_advice,
            beside=guard.beside.listed() if guard.beside else None,
        )


def _check_items(owner: str, name: str, value: object, kind: type | tuple[type, ...]) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, tuple) or not value or not all(isinstance(item, kinds) for item in value):
        expected = " or ".join(each.__name__ for each in kinds)
        hint = "; write (...,) around it, with the comma" if isinstance(value, kinds) else ""
        raise DefinitionError(
            f"{owner}: {name} is {_shown(value)}; expected a tuple of {expected}, with one item or more{hint}"
        )


@_names_fields
@dataclass(frozen=True)
class Signature:
    """An exception by which a bug shows in a log.

    Attributes:
        exception: its type, without the module.
        message: what the first line of its text contains; empty for any text.
        frames: functions, ``module:qualified.name``, one of which is in the traceback; empty for the targets of the
            patch's changes.
        specific: whether the text is this bug's own, so that it is likely even without a traceback. An empty text
            never is.
    """

    exception: str
    message: str = ""
    frames: tuple[str, ...] = ()
    specific: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.exception, str) or not self.exception.isidentifier():
            raise DefinitionError(
                f"Signature.exception is {_shown(self.exception)}: expected a type's name, 'KeyError' say"
            )
        _check_types(self, f"Signature of {self.exception}: ")
        for path in self.frames:
            if not (isinstance(path, str) and _OF_A_MODULE.fullmatch(path)):
                _check_path(path, "Signature.frames")
        if not self.message:
            object.__setattr__(self, "specific", False)


HARMS = ("wrong gradient", "wrong weights", "wrong data", "wrong metric", "hang", "crash", "memory", "slow")
"""What a bug does to a run, the worst first: what goes on and is found weeks later, then what stops or is seen."""


class KnownBug:
    """What a `Patch`, an `Advice` and a `Watch` have in common. Pages and CLI texts are generated from their fields.

    Attributes:
        name: kebab-case, framework first: ``megatron-forward-pre-hook-reentry``.
        summary: one line.
        symptom: what a user sees, error message included, so that a search for it finds this page.
        cause: why upstream does that (Markdown).
        references: addresses of upstream issues and pull requests.
        variants: one for each shape of upstream's code that has the bug. All are for the same distribution, and no
            release is in the range of two.
        retire: when this entry can be removed.
        signatures: for a bug that raises: the exceptions by which ``rlhf-patches diagnose`` tells it in a log.
        harm: one of `HARMS`, the worst that it does; nothing where that is not said.
        bug: what is wrong, in one line; of an advice its summary.
        when: the configuration in which it bites, in one line.
        never_with: settings with which it cannot, for certain: ``zero_optimization.stage=absent|0|3``. Each is a key of
            a configuration file or of the command line, with its dots, and values of it, in lower case; "absent" is for
            keys of DeepSpeed's file. One that holds is enough for ``rlhf-patches audit --config`` to fold the bug away.
        of_rollouts: whether it lies between the trainer and the engine that samples.
        changes_numbers, contested: of a `Patch`.
    """

    kind: ClassVar[str]
    name: str
    summary: str
    symptom: str
    cause: str
    references: tuple[str, ...]
    variants: tuple[Variant, ...]
    retire: str
    signatures: tuple[Signature, ...]
    harm: str
    bug: str
    when: str
    never_with: tuple[str, ...]
    of_rollouts: bool
    changes_numbers: str | None = None
    contested: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, f"{type(self).__name__}.name")
        _check_items(str(self), "references", self.references, str)
        _check_types(self, f"{self}: ")
        for text in self._texts():
            if not getattr(self, text).strip():
                raise DefinitionError(f"{self}: {text} is empty; users read it, so write it")
        for text in ("summary", "bug", "when"):
            if "\n" in getattr(self, text):
                raise DefinitionError(f"{self}: {text} has several lines; expected one")
        if self.harm not in ("", *HARMS):
            expected = f"{', '.join(HARMS)}, or nothing"
            raise DefinitionError(f"{self}: harm is {_shown(self.harm)}; expected one of {expected}")
        _check_items(str(self), "variants", self.variants, Variant)
        if self.signatures != ():
            _check_items(str(self), "signatures", self.signatures, Signature)
        for setting in self.never_with:
            if not _SETTING.fullmatch(setting):
                raise DefinitionError(
                    f"{self}: never_with has {_shown(setting)}; expected 'key=value|value' in lower case"
                )
        self._check_guards()

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.name}"

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return "summary", "symptom", "cause", "retire"

    def _check_guards(self) -> None:
        distributions = dict.fromkeys(variant.guard.distribution for variant in self.variants)
        if len(distributions) > 1:
            raise DefinitionError(
                f"{self}: its variants are for {', '.join(distributions)}; expected one distribution, "
                "and a patch of its own for each other"
            )
        for one, other in itertools.combinations(self.variants, 2):
            version = one.guard.shares_a_version_with(other.guard)
            if version is not None:
                raise DefinitionError(
                    f"{self}: version {version} is in the range of two variants, {one.guard.versions!r} and "
                    f"{other.guard.versions!r}; expected each release in one of them at most"
                )

    def listed(self, path: str) -> Listed:
        """Its entry in a list; ``path`` is where it is, as ``module:NAME``."""
        variants = tuple(variant.listed() for variant in self.variants)
        return Listed(self.name, path, variants, self.contested, self.kind == WATCH)

    @property
    def excluding(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The settings of `never_with`: each key with its values."""
        pairs = (setting.partition("=") for setting in self.never_with)
        return tuple((key, tuple(values.split("|"))) for key, _, values in pairs)

    @property
    def distribution(self) -> str:
        """The framework's name on PyPI."""
        return self.variants[0].guard.distribution

    @property
    def versions(self) -> str:
        """The releases that have the bug: the ranges of all variants."""
        return ranges_of(variant.guard for variant in self.variants)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of all variants."""
        return modules_of(self.variants)

    @property
    def implementations(self) -> tuple[str, ...]:
        """What the changes of all variants put to use, as ``module:qualified.name``."""
        return put_to_use(change for variant in self.variants for change in variant.changes)


@_names_fields
@dataclass(frozen=True)
class Patch(KnownBug):
    """One known bug and its repair.

    Attributes:
        repair: what the patch changes, and what it leaves alone (Markdown).
        observations: ``module:function``, which says what the patch has done so far in this process, as a
            dictionary of plain values (``{"backward in place": 3}``); reports show it. Called only if something
            else has imported the module, so it belongs to the module of the implementation, or near it.
        changes_numbers: for a repair of numbers that a user may have tuned to: what was wrong, since which release, and
            what a run that was trained with it should do. One paragraph. The page has it as a section, ``doctor``,
            ``check`` and reports beside the patch, and the log says it once when the patch is applied.
        contested: where upstream has not agreed that it is a bug, who holds what, or where it is right for some runs
            alone, which: in one line. Such a patch is off unless it is asked for by its name, in
            ``RLHF_PATCHES_ENABLE`` say.
        conditions: when the bug bites in a call of a target, so that reports say whether a run has suffered.
    """

    kind = PATCH
    name: str
    summary: str
    symptom: str
    cause: str
    repair: str
    references: tuple[str, ...]
    variants: tuple[Variant, ...]
    retire: str
    observations: str | None = None
    changes_numbers: str | None = None
    signatures: tuple[Signature, ...] = ()
    contested: str = ""
    harm: str = ""
    bug: str = ""
    when: str = ""
    never_with: tuple[str, ...] = ()
    of_rollouts: bool = False
    conditions: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conditions != ():
            _check_items(str(self), "conditions", self.conditions, Condition)
        targets = dict.fromkeys(change.target for variant in self.variants for change in variant.changes)
        for condition in self.conditions:
            if condition.target not in targets:
                expected = ", ".join(targets)
                raise DefinitionError(f"{self}: a condition is of {condition.target}; expected a target, {expected}")
        if "\n" in self.contested or self.contested != self.contested.strip():
            raise DefinitionError(f"{self}: contested is {_shown(self.contested)}; expected one line, or nothing")
        if any(variant.is_advice for variant in self.variants):
            raise DefinitionError(f"{self}: a variant has shapes and no change; expected an Advice, or changes")
        if self.observations is not None:
            _check_path(self.observations, f"{self}: observations")
        if self.changes_numbers is not None and not self.changes_numbers.strip():
            raise DefinitionError(
                f"{self}: changes_numbers is empty; expected what was wrong, since which release, and "
                "what a run that was trained with it should do, or None"
            )

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return *super()._texts(), "repair"


@_names_fields
@dataclass(frozen=True)
class Advice(KnownBug):
    """One known bug that nothing here repairs, and what to do about it. It is recognised and told, and changes nothing.

    Attributes:
        what_to_do: which release or which setting does not have it. One paragraph: ``doctor``, ``check`` and reports
            show it below the entry, and the log says it as a warning, once per process that imports the code.
    """

    kind = ADVICE
    name: str
    summary: str
    symptom: str
    cause: str
    what_to_do: str
    references: tuple[str, ...]
    variants: tuple[Variant, ...]
    retire: str
    signatures: tuple[Signature, ...] = ()
    harm: str = ""
    bug: str = ""
    when: str = ""
    never_with: tuple[str, ...] = ()
    of_rollouts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(variant.is_advice for variant in self.variants):
            raise DefinitionError(f"{self}: a variant has changes, which an advice does not make; expected shapes")

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return *super()._texts(), "what_to_do"


@_names_fields
@dataclass(frozen=True)
class Watch(KnownBug):
    """A look at what a framework has at hand anyway, which says once when a figure of the run is out of its limit.

    It changes no result and no state of the framework's: no forward pass, no collective, no synchronisation of a GPU.
    Its changes are all a `Wrap`, which goes around whatever patches the function has, and its implementations note
    figures (`rlhf_patches.watching`).

    Attributes:
        symptom: what the log says (Markdown).
        cause: what it is a sign of (Markdown).
        looks_at: what is read, where it is, and what that costs (Markdown).
        limits: each figure with its limit, and the reason for it (Markdown).
        points_to: patches and advices for bugs that have this sign.
        observations: ``module:function``: the figures so far, as that of a `Patch`.
    """

    kind = WATCH
    name: str
    summary: str
    symptom: str
    cause: str
    looks_at: str
    limits: str
    points_to: tuple[str, ...]
    references: tuple[str, ...]
    variants: tuple[Variant, ...]
    retire: str
    observations: str
    signatures: tuple[Signature, ...] = ()
    harm: str = ""
    bug: str = ""
    when: str = ""
    never_with: tuple[str, ...] = ()
    of_rollouts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_path(self.observations, f"{self}: observations")
        if not all(isinstance(change, Wrap) for variant in self.variants for change in variant.changes):
            raise DefinitionError(
                f"{self}: a variant has a change that is no Wrap; expected Wraps, which leave the code"
            )

    @classmethod
    def _texts(cls) -> tuple[str, ...]:
        return *super()._texts(), "looks_at", "limits"
