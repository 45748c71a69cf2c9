"""The decision, as far as versions tell: what becomes of a patch, or which of its variants the text has to decide on.

`decision` goes on with the text. This is all that a process needs in which no framework has been imported, so it stands
on nothing that reads or changes code. Nothing is imported or changed.
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
    from .shapes import Recognised


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


def look(variant: Variant | ListedVariant, origins: Mapping[str, str | None] | None = None) -> Found:
    """What is installed here of a variant's modules.

    Args:
        variant: the variant.
        origins: the files of those modules that are not to be looked for.
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
    """What becomes of a patch where nothing of its framework is there; None where `choose` has to tell."""
    if any(module in sys.modules or locating.exists(module) for module in patch.modules):
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
            return advice_if_refused(Decision(Status.REFUSED, reason, affected.finding.version), (affected.variant,))
        return Decision(Status.ABSENT, affected.absence, affected.finding.version)
    there = [one for one in found if one.missing is None]
    if not there:
        return Decision(Status.ABSENT, "; ".join(dict.fromkeys(one.absence for one in found)), found[0].finding.version)
    unknown = [one for one in there if one.finding.verdict is Verdict.UNKNOWN]
    if unknown:
        return Choice(unknown[0].finding, tuple(one.variant for one in unknown), len(found) > 1)
    guards = [one.variant.guard for one in found]
    finding = next(
        (one.finding for one in there if one.finding.beside_was_read is not None),
        versions.outside(guards[0].distribution, there[0].finding.version, guards),
    )
    return Choice(finding, tuple(one.variant for one in there))


def advice_if_refused(found: Decision, variants: Sequence[Variant | ListedVariant]) -> Decision:
    """An advice changes nothing, so it cannot be refused: it is told with the doubt."""
    if found.status is not Status.REFUSED or not variants[0].is_advice:
        return found
    return found._replace(status=Status.ADVICE, reason=f"{found.reason}; whether the bug is there is not known")


def unasked(choice: Choice | Decision, why: str) -> Decision:
    """What becomes of a patch that is contested upstream and was not asked for: the text does not matter."""
    if isinstance(choice, Decision):
        return choice if choice.status is Status.ABSENT else Decision(Status.DISABLED, why, choice.version)
    if choice.finding.verdict is Verdict.OUTSIDE:
        return unaffected(choice.finding)
    return Decision(Status.DISABLED, why, choice.finding.version)


def unaffected(finding: Finding, unreviewed: bool = False) -> Decision:
    """What becomes of a patch whose version is known and in the range of none of its variants."""
    reason = finding.reason + (UNREVIEWED if unreviewed else "")
    return Decision(Status.UNAFFECTED, reason, finding.version, unreviewed=unreviewed)
