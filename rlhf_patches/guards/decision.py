"""The decision: what becomes of a patch, given a copy of its framework. A table of it is in docs/architecture.md.

The engine, ``doctor``, ``check`` and the record of releases all ask here. Two steps, because text costs time:
`choose` knows the version and which modules exist, `decide` looks at the text. Nothing is imported or changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

from ..definitions.patch import Listed, ListedVariant, Rewrite, Variant
from ..definitions.status import Status
from . import shapes, sources, versions
from .implementations import Unusable
from .rewriting import Edit, NoEffect, Undefined, Unrecognised
from .shapes import Recognised
from .sources import NotFound, Source, Unreadable
from .versions import UNREVIEWED, Finding, Verdict


class CannotApply(Exception):
    """The code is recognised, but cannot be changed as things are; the message says why."""


class Conflict(CannotApply):
    """Another patch holds the function; the message names it."""


class Found(NamedTuple):
    """One variant, and what is known of a copy of its framework without reading the code.

    Attributes:
        variant: the variant.
        finding: what its version guard says.
        missing: which of its modules does not exist, as a sentence; None where all are there.
        absence: what to say if that means that the framework is not there.
    """

    variant: Variant | ListedVariant
    finding: Finding
    missing: str | None = None
    absence: str = ""


class Choice(NamedTuple):
    """The variants that a copy's version leaves: one if it is affected; if it is not, those whose modules exist."""

    finding: Finding
    variants: tuple[Variant | ListedVariant, ...]
    of_several: bool = False


class Decision(NamedTuple):
    """What becomes of a patch. With APPLIES, ``variant`` and where its changes are in the text.

    An advice, of which nothing is applied, is ADVICE where a patch is APPLIES or REFUSED.
    """

    status: Status
    reason: str
    version: str | None = None
    variant: Variant | None = None
    recognised: tuple[Recognised, ...] = ()
    unreviewed: bool = False


# --------------------------------------------------------------------------------------- by version


def look(variant: Variant | ListedVariant, origins: Mapping[str, str | None] | None = None) -> Found:
    """What is installed here of a variant's modules.

    Args:
        variant: the variant.
        origins: the files of those modules that are not to be looked for.
    """
    places: dict[str, str | None] = {}
    for module in variant.modules:
        try:
            places[module] = origins[module] if origins and module in origins else sources.locate(module).origin
        except NotFound as error:
            version, absence = versions.why_absent(variant.guard, error)
            finding = versions.judge_missing(variant.guard, sources.parents_of(module))
            return Found(variant, finding._replace(version=version), str(error), absence)
    return Found(variant, versions.worst([versions.judge_file(variant.guard, place) for place in places.values()]))


def absence(patch: Listed) -> Decision | None:
    """What becomes of a patch where nothing of its framework is there; None where `choose` has to tell."""
    if any(module in sys.modules or sources.exists(module) for module in patch.modules):
        return None
    if versions.is_installed(patch.distribution):
        return None
    return Decision(Status.ABSENT, versions.not_installed(patch.distribution))


def choose(found: Sequence[Found]) -> Choice | Decision:
    """Which of a patch's variants may be meant, or what becomes of it if none is.

    The ranges of variants have no version in common, so a version that is known and affected chooses one.
    """
    affected = next((one for one in found if one.finding.verdict is Verdict.AFFECTED), None)
    if affected is not None:
        if affected.missing is None:
            return Choice(affected.finding, (affected.variant,))
        if affected.variant.guard.may_be_missing is None:
            reason = f"{affected.finding.reason}, but {affected.missing}"
            return _told(Decision(Status.REFUSED, reason, affected.finding.version), (affected.variant,))
        return Decision(Status.ABSENT, affected.absence, affected.finding.version)
    there = [one for one in found if one.missing is None]
    if not there:
        return Decision(Status.ABSENT, "; ".join(dict.fromkeys(one.absence for one in found)), found[0].finding.version)
    unknown = [one for one in there if one.finding.verdict is Verdict.UNKNOWN]
    if unknown:
        return Choice(unknown[0].finding, tuple(one.variant for one in unknown), len(found) > 1)
    guards = [one.variant.guard for one in found]
    finding = versions.outside(guards[0].distribution, there[0].finding.version, guards)
    return Choice(finding, tuple(one.variant for one in there))


# ------------------------------------------------------------------------------------------ by text


def decide(choice: Choice, read: Callable[[str], Source]) -> Decision:
    """What becomes of a patch, given the text of its modules.

    Args:
        choice: what `choose` has left.
        read: gives the text of a module; raises `Unreadable`.
    """
    finding, version = choice.finding, choice.finding.version
    recognised, errors = shapes_in(choice.variants, read)
    if finding.verdict is Verdict.OUTSIDE:
        unreviewed = any(map(_compiles, recognised.values()))
        return Decision(
            Status.UNAFFECTED, finding.reason + (UNREVIEWED if unreviewed else ""), version, unreviewed=unreviewed
        )
    if len(recognised) > 1 and not choice.variants[0].is_advice:
        ranges = " and ".join(str(variant.guard) for variant in recognised)
        return Decision(Status.REFUSED, f"{finding.reason}, and the code is recognised as that of {ranges}", version)
    for variant, items in recognised.items():
        which = f", and the code is that of {variant.guard}" if choice.of_several else ""
        if variant.is_advice:
            return Decision(Status.ADVICE, f"{finding.reason}{which}, and nothing here repairs it", version)
        return Decision(Status.APPLIES, finding.reason + which, version, variant, tuple(items))
    return _told(refusal(finding, *errors), choice.variants)


def _told(found: Decision, variants: Sequence[Variant | ListedVariant]) -> Decision:
    """An advice changes nothing, so it cannot be refused: it is told with the doubt."""
    if found.status is not Status.REFUSED or not variants[0].is_advice:
        return found
    return found._replace(status=Status.ADVICE, reason=f"{found.reason}; whether the bug is there is not known")


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
    except Exception:  # whatever it is, it is not the code that the patch was written for
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

    @property
    def holders(self) -> list[str]:
        """The patches on this function."""
        return list(self.rewrites) + ([self.trampoline_of] if self.trampoline_of else [])


def check_kind(code: CodeType, name: str) -> None:
    """Check that a function can be replaced or wrapped.

    Raises:
        CannotApply: it is an asynchronous generator, whose send and throw cannot be handed through.
    """
    if code.co_flags & inspect.CO_ASYNC_GENERATOR:
        raise CannotApply(f"{name} is an asynchronous generator, which cannot be replaced or wrapped")


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
        if held.holders:
            raise Conflict(f"{target} is patched by {', '.join(held.holders)} already")
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
