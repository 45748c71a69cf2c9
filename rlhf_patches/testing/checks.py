"""The requirements of every patch; each function raises AssertionError if its requirement is not met.

pytest shows none of their frames: the message suffices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..definitions.bug import KnownBug
from ..definitions.guard import OLDER, Guard
from ..definitions.patch import Advice
from ..definitions.status import PatchReport, Status
from ..offline import facts
from . import conduct, rules
from .cases import UNKNOWN, Case

_UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")


def fields_are_complete(patch: KnownBug) -> None:
    """Every text for users is written."""
    __tracebackhide__ = True
    texts = {name: getattr(patch, name) for name in patch._texts()}
    texts |= {f"references[{number}]": text for number, text in enumerate(patch.references)}
    texts |= {"changes_numbers": patch.changes_numbers} if patch.changes_numbers else {}
    unfinished = [name for name, text in texts.items() if not text.strip() or _UNFINISHED.search(text)]
    _require(not unfinished, f"{patch}: not written yet: {', '.join(unfinished)}; users read these texts")


def waits_have_bounds(patch: KnownBug) -> None:
    """Its code has no unbounded lock or wait, so that training always continues."""
    __tracebackhide__ = True
    findings = conduct.waits(patch)
    what_to_do = "add a timeout, or state why the wait ends in a comment on the line: # waits: ..."
    _require(not findings, "\n".join([f"{patch}: {what_to_do}", *map(str, findings)]))


def side_effects(patch: KnownBug) -> None:
    """Its code does not write to its arguments, and calls no function that may."""
    __tracebackhide__ = True
    findings = conduct.writes(patch)
    what_to_do = "remove it, or, if it is the repair, state that in a comment on the line: # writes: ..."
    _require(not findings, "\n".join([f"{patch}: {what_to_do}", *map(str, findings)]))


def it_knows(patch: KnownBug) -> None:
    """Its code decides by no name, signature, stack or autograd graph without a comment that justifies it."""
    __tracebackhide__ = True
    findings = conduct.unknown(patch)
    what_to_do = "inspect the object itself, or justify the decision in a comment on the line: # known: ..."
    _require(not findings, "\n".join([f"{patch}: {what_to_do}", *map(str, findings)]))


def is_held(patches: Collection[KnownBug], by: rules.Held, tests: Mapping[str, Collection[str]]) -> None:
    """Each rule, and each sentence that promises no change, has an existing test or a reason.

    Args:
        patches: the patches of one test module.
        by: the module's RULE_COVERAGE.
        tests: as for `rules.wrong_with`.
    """
    __tracebackhide__ = True
    wrong = rules.wrong_with(by, patches, tests)
    _require(not wrong, "\n".join([f"the tests named for {', '.join(map(str, patches))}:", *wrong]))


def applies(case: Case, folder: Path) -> None:
    """It applies to the unmodified release, also without a known version."""
    __tracebackhide__ = True
    expected = Status.ADVICE if isinstance(case.patch, Advice) else Status.APPLIES
    for version, row in case.rows(folder, (case.version, UNKNOWN)).items():
        _is(row, expected, f"on the text of {case} (version {version})")


def refused_where_edited(case: Case, folder: Path) -> None:
    """It is refused if any function that it changes is edited; unaffected without a known version."""
    __tracebackhide__ = True
    others = [other.guard for other in case.patch.variants if other is not case.variant]
    elsewhere = [f"the code matches {guard.distribution} {guard.versions}" for guard in others]
    edits = list(case.edits())
    _require(bool(edits), f"{case}: no function was edited")
    for target, module, text in edits:
        for version, row in case.rows(folder, (case.version, UNKNOWN), {module: text}).items():
            what = f"with {target} edited (version {version}): its shape guard is too wide"
            if version == UNKNOWN:
                # Another variant may have the other changes, and not this one.
                if not any(text in row.reason for text in elsewhere):
                    _is(row, Status.UNAFFECTED, what)
            elif isinstance(case.patch, Advice):
                _require("the bug may be present" in row.reason, f"{_status_of(row)} {what}")
            else:
                _is(row, Status.REFUSED, what)


def is_open_at(patch: KnownBug, version: str) -> bool:
    """Whether OLDER or NEWER is in the range of a patch."""
    return facts.claimed(patch, version) is not None


def stays_away_outside(case: Case, folder: Path, version: str) -> None:
    """It does not apply to OLDER and NEWER, even with the code that it is for."""
    __tracebackhide__ = True
    end, sign = ("older", ">=") if version == OLDER else ("newer", "<=")
    _require(
        not is_open_at(case.patch, version),
        f"{case.patch} is for {case.patch.distribution} {case.patch.versions or '(every version)'}, which is open at "
        f"the {end} end: expected {sign} and a reviewed release, because other releases are unknown",
    )
    _is(case.rows(folder, [version])[version], Status.UNAFFECTED, f"on version {version}")


def stays_away_beside(case: Case, folder: Path, version: str) -> None:
    """It does not apply with OLDER or NEWER of the other distribution, and applies with one in its range."""
    __tracebackhide__ = True
    other = case.variant.guard.co_installed
    assert other is not None
    guard = Guard(other.distribution, other.versions)
    inside = guard.shares_a_version_with(guard)
    expected = Status.ADVICE if isinstance(case.patch, Advice) else Status.APPLIES
    if inside is not None:
        row = case.rows(folder / "inside", [case.version], beside=(other.distribution, inside))[case.version]
        _is(row, expected, f"with {other.distribution} {inside}")
    row = case.rows(folder / "outside", [case.version], beside=(other.distribution, version))[case.version]
    _is(row, Status.UNAFFECTED, f"with {other.distribution} {version}")


def leaves_alone(case: Case, folder: Path, affected: str | None) -> None:
    """It does not apply to a release without the bug: with its version, without one, and with an affected version.

    Args:
        case: the release.
        folder: an empty folder.
        affected: an affected version, under which the patch must not accept this code; None to skip that.
    """
    __tracebackhide__ = True
    doubt = Status.ADVICE if isinstance(case.patch, Advice) else Status.REFUSED
    expected = {case.version: Status.UNAFFECTED, UNKNOWN: Status.UNAFFECTED}
    expected |= {affected: doubt} if affected else {}
    for version, row in case.rows(folder, expected).items():
        what = f"on {case}, as version {version}, which does not have the bug"
        _is(row, expected[version], what)
        _require(not row.unreviewed, f"{_status_of(row)} {what}: is the range too short?")


def lives_as_it_should(patch: KnownBug, life: dict[str, Any]) -> None:
    """The code differs while it is applied; the original code objects are back after a revert, and when disabled.

    Args:
        patch: the patch.
        life: the result of `in_process.life`.
    """
    __tracebackhide__ = True
    advice = isinstance(patch, Advice)
    on, functions = life["applied"], life["functions"]
    expected = Status.ADVICE if advice else Status.APPLIED
    _require(on["status"] == expected.value, f"{patch} is {on['status']} in this process: {on['reason']}")
    same = [name for name, own in zip(functions, on["own code"], strict=True) if own]
    _require(advice or not same, f"{patch} is applied, but the code of {', '.join(same)} has not changed")
    for what in ("reverted", "disabled"):
        now = life[what]
        other = [name for name, own in zip(functions, now["own code"], strict=True) if not own]
        _require(not other, f"{patch} is {what}, but {', '.join(other)} has other code than before: {now['reason']}")
        _require(now["status"] == "disabled", f"{patch}, {what}, is {now['status']}: {now['reason']}")
    reason = life["disabled"]["reason"]
    _require("RLHF_PATCHES_DISABLE" in reason, f"{patch} is disabled, but not by RLHF_PATCHES_DISABLE: {reason}")


def _is(row: PatchReport, status: Status, what: str) -> None:
    __tracebackhide__ = True
    _require(row.status is status, f"{_status_of(row)} {what}; expected {status}")


def _status_of(row: PatchReport) -> str:
    return f"{row.name} is {row.status} ({row.reason})"


def _require(condition: bool, message: str) -> None:
    __tracebackhide__ = True
    # Not an assert statement, which -O removes.
    if not condition:
        raise AssertionError(message)
