"""The decision on a patch, given a copy of its framework. docs/architecture.md has a table of it.

The engine, ``doctor``, ``check`` and the record of releases all use it. It has two steps, because reading text takes
time: `choices.choose` uses the version and the existing modules, `decide` reads the text. Nothing is imported or
changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType

from ..definitions.changes import Rewrite, Shape
from ..definitions.listed import ListedVariant
from ..definitions.status import Status
from ..definitions.variant import Variant
from ..import_system import no_signal
from . import choices, known, shapes
from .choices import Choice, Decision
from .edits import Edit, NoEffect, Undefined, Unrecognized
from .implementations import Unusable
from .places import Source, Unreadable
from .shapes import Recognized
from .versions import Finding, Verdict


class CannotApply(Exception):
    """The code is recognized, but cannot be changed now; the message gives the reason."""


class Conflict(CannotApply):
    """Another patch has changed the function; the message names it."""


def decide(choice: Choice, read: Callable[[str], Source]) -> Decision:
    """Return the outcome for a patch, given the text of its modules.

    Args:
        choice: the result of `choices.choose`.
        read: returns the text of a module; raises `Unreadable`.
    """
    finding, version = choice.finding, choice.finding.version
    recognized, errors = shapes_in(choice.variants, read)
    if finding.verdict is Verdict.OUTSIDE:
        seen = not finding.beside_was_read and any(map(_compiles, recognized.values()))
        return choices.unaffected(finding, unreviewed=seen)
    if len(recognized) > 1 and not choice.variants[0].is_advice:
        ranges = " and ".join(str(variant.guard) for variant in recognized)
        return Decision(Status.REFUSED, f"{finding.reason}, and the code matches {ranges}", version)
    for variant, items in recognized.items():
        which = f", and the code matches {variant.guard}" if choice.of_several else ""
        if variant.is_advice:
            return Decision(Status.ADVICE, f"{finding.reason}{which}, without a repair", version)
        return Decision(Status.APPLIES, finding.reason + which, version, variant, tuple(items))
    return choices.advice_if_refused(refusal(finding, *errors), choice.variants)


def has_to_search(choice: Choice, read: Callable[[str], Source]) -> bool:
    """Whether `decide` will search for patterns, because some text is not known (`known`)."""
    try:
        return any(
            isinstance(change, (Rewrite, Shape)) and known.find(change, read(change.target.partition(":")[0])) is None
            for variant in choice.variants
            for change in variant.changes  # type: ignore[union-attr]
        )
    except Unreadable:  # `decide` will report it
        return False


def shapes_in(
    variants: Iterable[Variant | ListedVariant], read: Callable[[str], Source]
) -> tuple[dict[Variant, list[Recognized]], list[Exception]]:
    """Return the variants whose shape is in the text (`widest`), and why the others do not match.

    Raises:
        TypeError: a variant is only listed, so its shape is unknown.
    """
    by_variant: dict[Variant, list[Recognized]] = {}
    errors: list[Exception] = []
    for variant in variants:
        if isinstance(variant, ListedVariant):
            raise TypeError(f"{variant} is not imported")
        try:
            by_variant[variant] = shapes.recognize_all(variant, {module: read(module) for module in variant.modules})
        except (Unrecognized, Unreadable) as error:
            errors.append(error)
    return {variant: by_variant[variant] for variant in widest(by_variant)}, errors


def widest(variants: Iterable[Variant]) -> list[Variant]:
    """Return the matching variants without those whose changes are a subset of another's changes."""
    variants = [*variants]
    if len(variants) < 2:  # hashing a variant hashes all its changes
        return variants
    changes = {variant: set(variant.changes) for variant in variants}
    return [one for one, own in changes.items() if not any(own < more for more in changes.values())]


def _compiles(recognized: list[Recognized]) -> bool:
    try:
        shapes.check_compiles(recognized)
    except no_signal(Exception):  # in any case it is not the code that the patch was written for
        return False
    return True


def refusal(finding: Finding, *errors: Exception) -> Decision:
    """Return the outcome for a patch that does not match or cannot be applied, given the version guard's result."""
    text = "; ".join(dict.fromkeys(map(str, errors)))
    if all(isinstance(error, NoEffect) for error in errors):
        return Decision(Status.UNAFFECTED, text, finding.version)
    if finding.verdict is Verdict.UNKNOWN and all(isinstance(error, (NoEffect, Unrecognized)) for error in errors):
        reason = f"{finding.reason}, and the code does not have the defect: {text}"
        return Decision(Status.UNAFFECTED, reason, finding.version)
    status = Status.FAILED if any(isinstance(error, FAULTS) for error in errors) else Status.REFUSED
    return Decision(status, f"{finding.reason}, but {text}", finding.version)


FAULTS = (Unusable, Undefined)
"""Errors of the patch, not of the framework's code."""

REFUSALS = (NoEffect, Unrecognized, Unreadable, CannotApply, *FAULTS)
"""The exceptions that `refusal` handles; any other exception is a failure."""


# -------------------------------------------------------------------------------- with other patches


@dataclass(eq=False)
class Held:
    """The changes of all patches to one function."""

    rewrites: dict[str, list[Edit]] = field(default_factory=dict)
    trampoline_of: str | None = None
    watched_by: str | None = None

    @property
    def patches(self) -> list[str]:
        """The patches of this function."""
        return list(self.rewrites) + ([self.trampoline_of] if self.trampoline_of else [])

    @property
    def holders(self) -> list[str]:
        """The patches of this function, and its watch."""
        return self.patches + ([self.watched_by] if self.watched_by else [])


def check_kind(code: CodeType, name: str) -> None:
    """Check that a function can be replaced or wrapped.

    Raises:
        CannotApply: it is an asynchronous generator, whose send and throw cannot be passed on.
    """
    if code.co_flags & inspect.CO_ASYNC_GENERATOR:
        raise CannotApply(f"{name} is an asynchronous generator, which cannot be replaced or wrapped")


def check_watch(target: str, held: Held) -> None:
    """Check that a function can be watched, with any patches.

    Raises:
        Conflict: another watch watches it.
    """
    if held.watched_by:
        raise Conflict(f"{target} is already watched by {held.watched_by}")


def edits_beside(name: str, changes: Sequence[Recognized], held: Held) -> list[Edit] | None:
    """Return the edits of one patch in one function, if they are compatible with the other patches' changes.

    Args:
        name: the patch.
        changes: its changes of the function.
        held: the function's existing changes.

    Returns:
        the edits of its rewrites; None if it replaces or wraps the function.

    Raises:
        CannotApply: the function is of a kind that cannot be wrapped.
        Conflict: two changes exclude each other.
        Unrecognized: two rewrites of the patch touch the same code.
    """
    target = changes[0].change.target
    rewrites = [item for item in changes if isinstance(item.change, Rewrite)]
    if len(rewrites) != len(changes) and len(changes) > 1:
        raise Conflict(f"{name} both rewrites and replaces or wraps {target}")
    if not rewrites:
        if held.patches:
            raise Conflict(f"{target} is already patched by {', '.join(held.patches)}")
        if changes[0].place.is_async:
            check_kind(changes[0].original_code(), target)
        return None
    if held.trampoline_of:
        raise Conflict(f"{target} is replaced or wrapped by {held.trampoline_of}")
    edits = shapes.combined([item.edits for item in rewrites], target)
    for other, present in held.rewrites.items():
        if any(edit.overlaps(theirs) for edit in edits for theirs in present):
            raise Conflict(f"{target}: {other} rewrites the same code")
    return edits
