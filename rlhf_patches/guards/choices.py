"""The decision by versions: the outcome for a patch, or the variants that the text must decide between.

`decision` continues with the text. A process without an imported framework needs only this module, so it imports no
code that reads or changes code. Nothing is imported or changed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..definitions.status import Status
from . import locating, versions
from .places import NotFound
from .versions import UNREVIEWED, Finding, Verdict

if TYPE_CHECKING:
    from ..definitions.listed import Listed, ListedVariant
    from ..definitions.variant import Variant
    from .shapes import Recognized


class Found(NamedTuple):
    """One variant, and the facts of a copy of its framework without reading the code.

    Attributes:
        variant: the variant.
        finding: the result of its version guard.
        missing: a sentence on a module that does not exist; None if all exist.
        absence: the reason to report if the framework is therefore absent.
    """

    variant: Variant | ListedVariant
    finding: Finding
    missing: str | None = None
    absence: str = ""


class Choice(NamedTuple):
    """The variants that remain by version: one if the version is affected; otherwise those whose modules exist."""

    finding: Finding
    variants: tuple[Variant | ListedVariant, ...]
    of_several: bool = False


class Decision(NamedTuple):
    """The outcome for a patch. With APPLIES, ``variant`` and the places of its changes in the text.

    An advice has the status ADVICE where a patch has APPLIES or REFUSED.
    """

    status: Status
    reason: str
    version: str | None = None
    variant: Variant | None = None
    recognized: tuple[Recognized, ...] = ()
    unreviewed: bool = False


def look(variant: Variant | ListedVariant, origins: Mapping[str, str | None] | None = None) -> Found:
    """Return what is installed of a variant's modules.

    Args:
        variant: the variant.
        origins: the files of the modules that are already known.
    """
    places: dict[str, str | None] = {}
    for module in variant.modules:
        try:
            places[module] = origins[module] if origins and module in origins else locating.locate(module).origin
        except NotFound as error:
            version, absence = versions.why_absent(variant.guard, error)
            finding = versions.judge_missing(variant.guard, locating.parents_of(module))
            finding = versions.with_beside(variant.guard, finding)
            return Found(variant, finding._replace(version=version), str(error), absence)
    finding = versions.worst([versions.judge_file(variant.guard, place) for place in places.values()])
    return Found(variant, versions.with_beside(variant.guard, finding))


def absence(patch: Listed) -> Decision | None:
    """Return the outcome if nothing of the framework is installed; None if `choose` must decide."""
    if any(module in sys.modules or locating.exists(module) for module in patch.modules):
        return None
    if versions.is_installed(patch.distribution):
        return None
    return Decision(Status.ABSENT, versions.not_installed(patch.distribution))


def choose(candidates: Sequence[Found]) -> Choice | Decision:
    """Return the possible variants of a patch, or its outcome if there is none.

    The ranges of variants do not overlap, so a known and affected version selects one.
    """
    affected = next((one for one in candidates if one.finding.verdict is Verdict.AFFECTED), None)
    if affected is not None:
        if affected.missing is None:
            return Choice(affected.finding, (affected.variant,))
        if affected.variant.guard.may_be_missing is None:
            reason = f"{affected.finding.reason}, but {affected.missing}"
            return advice_if_refused(Decision(Status.REFUSED, reason, affected.finding.version), (affected.variant,))
        return Decision(Status.ABSENT, affected.absence, affected.finding.version)
    there = [one for one in candidates if one.missing is None]
    if not there:
        first, *others = dict.fromkeys(one.absence for one in candidates)
        beginning = first.partition("there is no module")[0]
        reason = "; ".join([first, *(each.removeprefix(beginning) for each in others)])
        return Decision(Status.ABSENT, reason, candidates[0].finding.version)
    unknown = [one for one in there if one.finding.verdict is Verdict.UNKNOWN]
    if unknown:
        return Choice(unknown[0].finding, tuple(one.variant for one in unknown), len(candidates) > 1)
    guards = [one.variant.guard for one in candidates]
    finding = next(
        (one.finding for one in there if one.finding.beside_was_read is not None),
        versions.outside(guards[0].distribution, there[0].finding.version, guards),
    )
    return Choice(finding, tuple(one.variant for one in there))


def advice_if_refused(decision: Decision, variants: Sequence[Variant | ListedVariant]) -> Decision:
    """Turn a refused advice into an uncertain one: an advice changes nothing, so it cannot be refused."""
    if decision.status is not Status.REFUSED or not variants[0].is_advice:
        return decision
    return decision._replace(status=Status.ADVICE, reason=f"{decision.reason}; the bug may be present")


def unasked(choice: Choice | Decision, why: str) -> Decision:
    """Return the outcome of a contested patch that is not enabled by name: the text does not matter."""
    if isinstance(choice, Decision):
        return choice if choice.status is Status.ABSENT else Decision(Status.DISABLED, why, choice.version)
    if choice.finding.verdict is Verdict.OUTSIDE:
        return unaffected(choice.finding)
    return Decision(Status.DISABLED, why, choice.finding.version)


def unaffected(finding: Finding, unreviewed: bool = False) -> Decision:
    """Return the outcome for a known version that is in no variant's range."""
    reason = finding.reason + (UNREVIEWED if unreviewed else "")
    return Decision(Status.UNAFFECTED, reason, finding.version, unreviewed=unreviewed)
