"""The decision: what becomes of a patch, given a copy of its framework. A table of it is in docs/architecture.md.

The engine, ``doctor``, ``check`` and the record of releases all ask here. Two steps, because text costs time:
`choices.choose` knows the version and which modules exist, `decide` looks at the text. Nothing is imported or changed.
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
from .edits import Edit, NoEffect, Undefined, Unrecognised
from .implementations import Unusable
from .places import Source, Unreadable
from .shapes import Recognised
from .versions import Finding, Verdict


class CannotApply(Exception):
    """The code is recognised, but cannot be changed as things are; the message says why."""


class Conflict(CannotApply):
    """Another patch holds the function; the message names it."""


def decide(choice: Choice, read: Callable[[str], Source]) -> Decision:
    """What becomes of a patch, given the text of its modules.

    Args:
        choice: what `choices.choose` has left.
        read: gives the text of a module; raises `Unreadable`.
    """
    finding, version = choice.finding, choice.finding.version
    recognised, errors = shapes_in(choice.variants, read)
    if finding.verdict is Verdict.OUTSIDE:
        seen = not finding.beside_was_read and any(map(_compiles, recognised.values()))
        return choices.unaffected(finding, unreviewed=seen)
    if len(recognised) > 1 and not choice.variants[0].is_advice:
        ranges = " and ".join(str(variant.guard) for variant in recognised)
        return Decision(Status.REFUSED, f"{finding.reason}, and the code is recognised as that of {ranges}", version)
    for variant, items in recognised.items():
        which = f", and the code is that of {variant.guard}" if choice.of_several else ""
        if variant.is_advice:
            return Decision(Status.ADVICE, f"{finding.reason}{which}, and nothing here repairs it", version)
        return Decision(Status.APPLIES, finding.reason + which, version, variant, tuple(items))
    return choices.advice_if_refused(refusal(finding, *errors), choice.variants)


def has_to_search(choice: Choice, read: Callable[[str], Source]) -> bool:
    """Whether `decide` will look for patterns, because some text is not known (`known`)."""
    try:
        return any(
            isinstance(change, (Rewrite, Shape)) and known.find(change, read(change.target.partition(":")[0])) is None
            for variant in choice.variants
            for change in variant.changes  # type: ignore[union-attr]
        )
    except Unreadable:  # as `decide` will say
        return False


def shapes_in(
    variants: Iterable[Variant | ListedVariant], read: Callable[[str], Source]
) -> tuple[dict[Variant, list[Recognised]], list[Exception]]:
    """Which variants have their shape in the text (`widest`), and why the others have not.

    Raises:
        TypeError: a variant is only listed, so that nothing is known of its shape.
    """
    found: dict[Variant, list[Recognised]] = {}
    errors: list[Exception] = []
    for variant in variants:
        if isinstance(variant, ListedVariant):
            raise TypeError(f"{variant} is not imported")
        try:
            found[variant] = shapes.recognise_all(variant, {module: read(module) for module in variant.modules})
        except (Unrecognised, Unreadable) as error:
            errors.append(error)
    return {variant: found[variant] for variant in widest(found)}, errors


def widest(variants: Iterable[Variant]) -> list[Variant]:
    """Of variants whose shape is there, those that count: not one whose changes are all among another's.

    It repairs the same, and less.
    """
    variants = [*variants]
    if len(variants) < 2:  # their hashes are those of all that they hold
        return variants
    changes = {variant: set(variant.changes) for variant in variants}
    return [one for one, own in changes.items() if not any(own < more for more in changes.values())]


def _compiles(recognised: list[Recognised]) -> bool:
    try:
        shapes.check_compiles(recognised)
    except no_signal(Exception):  # whatever it is, it is not the code that the patch was written for
        return False
    return True


def refusal(finding: Finding, *errors: Exception) -> Decision:
    """What it means that a patch does not fit, or cannot be put on, given what the version guard has found."""
    text = "; ".join(dict.fromkeys(map(str, errors)))
    if all(isinstance(error, NoEffect) for error in errors):
        return Decision(Status.UNAFFECTED, text, finding.version)
    if finding.verdict is Verdict.UNKNOWN and all(isinstance(error, (NoEffect, Unrecognised)) for error in errors):
        reason = f"{finding.reason}, and the defect is not in the code: {text}"
        return Decision(Status.UNAFFECTED, reason, finding.version)
    status = Status.FAILED if any(isinstance(error, FAULTS) for error in errors) else Status.REFUSED
    return Decision(status, f"{finding.reason}, but {text}", finding.version)


FAULTS = (Unusable, Undefined)
"""Of the patch, not of the framework's code."""

REFUSALS = (NoEffect, Unrecognised, Unreadable, CannotApply, *FAULTS)
"""What `refusal` can tell about; any other exception is a failure."""


# -------------------------------------------------------------------------------- with other patches


@dataclass(eq=False)
class Held:
    """What other patches, and this one, have made of one function."""

    rewrites: dict[str, list[Edit]] = field(default_factory=dict)
    trampoline_of: str | None = None
    watched_by: str | None = None

    @property
    def patches(self) -> list[str]:
        """The patches on this function."""
        return list(self.rewrites) + ([self.trampoline_of] if self.trampoline_of else [])

    @property
    def holders(self) -> list[str]:
        """The patches on this function, and its watch."""
        return self.patches + ([self.watched_by] if self.watched_by else [])


def check_kind(code: CodeType, name: str) -> None:
    """Check that a function can be replaced or wrapped.

    Raises:
        CannotApply: it is an asynchronous generator, whose send and throw cannot be handed through.
    """
    if code.co_flags & inspect.CO_ASYNC_GENERATOR:
        raise CannotApply(f"{name} is an asynchronous generator, which cannot be replaced or wrapped")


def check_watch(target: str, held: Held) -> None:
    """Check that a function can be watched, whatever patches it has.

    Raises:
        Conflict: another watch has it.
    """
    if held.watched_by:
        raise Conflict(f"{target} is watched by {held.watched_by} already")


def edits_beside(name: str, changes: Sequence[Recognised], held: Held) -> list[Edit] | None:
    """The edits of one patch in one function, if they go together with what other patches have made of it.

    Args:
        name: the patch.
        changes: its changes of the function.
        held: what the function carries.

    Returns:
        the edits of its rewrites; None if it replaces or wraps the function.

    Raises:
        CannotApply: the function is of a kind that cannot be called through ours.
        Conflict: two changes exclude each other.
        Unrecognised: two rewrites of the patch touch the same code.
    """
    target = changes[0].change.target
    rewrites = [item for item in changes if isinstance(item.change, Rewrite)]
    if len(rewrites) != len(changes) and len(changes) > 1:
        raise Conflict(f"{name} both rewrites and replaces or wraps {target}")
    if not rewrites:
        if held.patches:
            raise Conflict(f"{target} is patched by {', '.join(held.patches)} already")
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
