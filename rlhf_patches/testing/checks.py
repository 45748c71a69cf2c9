"""What holds for every patch, each as a function that raises AssertionError where it does not.

pytest shows none of their frames: the message says all.
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
    """Every text that users read is written."""
    __tracebackhide__ = True
    texts = {name: getattr(patch, name) for name in patch._texts()}
    texts |= {f"references[{number}]": text for number, text in enumerate(patch.references)}
    texts |= {"changes_numbers": patch.changes_numbers} if patch.changes_numbers else {}
    unfinished = [name for name, text in texts.items() if not text.strip() or _UNFINISHED.search(text)]
    _require(not unfinished, f"{patch}: not written yet: {', '.join(unfinished)}; users read it, so write it")


def waits_have_bounds(patch: KnownBug) -> None:
    """Its code takes no lock, and waits for nothing, without a bound: whatever happens in training, it goes on."""
    __tracebackhide__ = True
    findings = conduct.waits(patch)
    what_to_do = "give it a timeout, or say why it ends in a comment on the line: # waits: ..."
    _require(not findings, "\n".join([f"{patch}: {what_to_do}", *map(str, findings)]))


def side_effects(patch: KnownBug) -> None:
    """Its code writes to nothing that it is given, and calls nothing that may."""
    __tracebackhide__ = True
    findings = conduct.writes(patch)
    what_to_do = "do without, or, if that is the repair, say so in a comment on the line: # writes: ..."
    _require(not findings, "\n".join([f"{patch}: {what_to_do}", *map(str, findings)]))


def it_knows(patch: KnownBug) -> None:
    """Its code decides by no name, signature, stack or graph of autograd's that it cannot say to be knowledge."""
    __tracebackhide__ = True
    findings = conduct.unknown(patch)
    what_to_do = "ask the object itself, or say in a comment on the line why this tells: # known: ..."
    _require(not findings, "\n".join([f"{patch}: {what_to_do}", *map(str, findings)]))


def is_held(patches: Collection[KnownBug], by: rules.Held, tests: Mapping[str, Collection[str]]) -> None:
    """Each rule, and each sentence that says that something is as it was, has a test that is there, or a reason.

    Args:
        patches: those of one module of tests.
        by: what that module says.
        tests: as for `rules.wrong_with`.
    """
    __tracebackhide__ = True
    wrong = rules.wrong_with(by, patches, tests)
    _require(not wrong, "\n".join([f"what holds {', '.join(map(str, patches))}:", *wrong]))


def applies(case: Case, folder: Path) -> None:
    """It is for the release as it is, also where nothing tells the version."""
    __tracebackhide__ = True
    expected = Status.ADVICE if isinstance(case.patch, Advice) else Status.APPLIES
    for version, row in case.rows(folder, (case.version, UNKNOWN)).items():
        _is(row, expected, f"on the text of {case} (version {version})")


def refused_where_edited(case: Case, folder: Path) -> None:
    """Each function that it changes, edited alone; unaffected where nothing tells the version."""
    __tracebackhide__ = True
    others = [other.guard for other in case.patch.variants if other is not case.variant]
    elsewhere = [f"the code is that of {guard.distribution} {guard.versions}" for guard in others]
    number = 0
    for number, (target, module, text) in enumerate(case.edits(), 1):
        for version, row in case.rows(folder / str(number), (case.version, UNKNOWN), {module: text}).items():
            what = f"with {target} edited (version {version}): its shape guard is too wide"
            if version == UNKNOWN:
                # Another variant may have the other changes, and not this one.
                if not any(text in row.reason for text in elsewhere):
                    _is(row, Status.UNAFFECTED, what)
            elif isinstance(case.patch, Advice):
                _require("whether the bug is there is not known" in row.reason, f"{_status_of(row)} {what}")
            else:
                _is(row, Status.REFUSED, what)
    _require(number > 0, f"{case}: no function was edited")


def is_open_at(patch: KnownBug, version: str) -> bool:
    """Whether OLDER or NEWER is in the range of a patch."""
    return facts.claimed(patch, version) is not None


def stays_away_outside(case: Case, folder: Path, version: str) -> None:
    """It leaves OLDER and NEWER alone, even with the code that it is for."""
    __tracebackhide__ = True
    end, sign = ("older", ">=") if version == OLDER else ("newer", "<=")
    _require(
        not is_open_at(case.patch, version),
        f"{case.patch} is for {case.patch.distribution} {case.patch.versions or '(every version)'}, which is open at "
        f"the {end} end: expected {sign} and a release that was read, since nobody knows the others",
    )
    _is(case.rows(folder, [version])[version], Status.UNAFFECTED, f"on version {version}")


def stays_away_beside(case: Case, folder: Path, version: str) -> None:
    """It leaves the release alone beside OLDER or NEWER of the other distribution, and takes it beside one it names."""
    __tracebackhide__ = True
    other = case.variant.guard.co_installed
    assert other is not None
    guard = Guard(other.distribution, other.versions)
    inside = guard.shares_a_version_with(guard)
    expected = Status.ADVICE if isinstance(case.patch, Advice) else Status.APPLIES
    if inside is not None:
        row = case.rows(folder / "inside", [case.version], beside=(other.distribution, inside))[case.version]
        _is(row, expected, f"beside {other.distribution} {inside}")
    row = case.rows(folder / "outside", [case.version], beside=(other.distribution, version))[case.version]
    _is(row, Status.UNAFFECTED, f"beside {other.distribution} {version}")


def leaves_alone(case: Case, folder: Path, affected: str | None) -> None:
    """A release without the bug: as what it is, where nothing tells the version, and where it claims to have the bug.

    Args:
        case: the release.
        folder: empty.
        affected: a version that has the bug, for which the patch must not take this code; None to do without.
    """
    __tracebackhide__ = True
    doubt = Status.ADVICE if isinstance(case.patch, Advice) else Status.REFUSED
    expected = {case.version: Status.UNAFFECTED, UNKNOWN: Status.UNAFFECTED}
    expected |= {affected: doubt} if affected else {}
    for version, row in case.rows(folder, expected).items():
        what = f"on {case}, as version {version}, which has not the bug"
        _is(row, expected[version], what)
        _require(not row.unreviewed, f"{_status_of(row)} {what}: is the range too short?")


def lives_as_it_should(patch: KnownBug, life: dict[str, Any]) -> None:
    """Other code while it is applied; the very same code objects after that, and where it is disabled.

    Args:
        patch: the patch.
        found: what `in_process.life` returned.
    """
    __tracebackhide__ = True
    advice = isinstance(patch, Advice)
    on, functions = life["applied"], life["functions"]
    expected = Status.ADVICE if advice else Status.APPLIED
    _require(on["status"] == expected.value, f"{patch} is {on['status']} in this process: {on['reason']}")
    same = [name for name, own in zip(functions, on["own code"], strict=True) if own]
    _require(advice or not same, f"{patch} is applied, and yet nothing has changed in {', '.join(same)}")
    for what in ("reverted", "disabled"):
        now = life[what]
        other = [name for name, own in zip(functions, now["own code"], strict=True) if not own]
        _require(not other, f"{patch} is {what}, and yet {', '.join(other)} has not its own code: {now['reason']}")
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
    # No assert statement: under -O it would be gone.
    if not condition:
        raise AssertionError(message)
