"""``audit``: which known bugs a lock file, a requirements file or this environment has, as pip-audit does it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..definitions import pages, registry
from ..definitions.patch import Advice
from ..definitions.status import plural, printable
from ..offline import audit, pin_files, pins
from ..offline.audit import Audited, Bug
from ..offline.pins import Unread
from . import output
from .catalogue import find
from .command_line import Commands, add_output

_SHOWN = 20  # entries that were not understood, each with its line


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "audit",
        _audit,
        "which known bugs these versions have, what repairs each, and which release fixes it; offline, from versions",
        "pip freeze | rlhf-patches audit - || echo 'look above'",
        wrong=(pins.PinsError,),
    )
    command.add_argument(
        "file",
        nargs="*",
        metavar="FILE",
        help="requirements or constraints, pyproject.toml, uv.lock, poetry.lock, pdm.lock, Pipfile.lock, pylock.toml, "
        "environment.yml, conda-lock's files, a Dockerfile, what `pip list` or `conda list` prints, as JSON too; '-': "
        "any of these on standard input; none: this environment",
    )
    add_output(command)
    command.add_argument(
        "--ignore", metavar="NAME", action="append", default=[], help="a patch whose bug does not count; repeatable"
    )


@dataclass(frozen=True)
class _Findings:
    """``named`` counts the pins of whatever distribution, ``not_read`` says of each file why nothing is known of it."""

    named: int
    audited: list[Audited]
    unread: list[Unread]
    not_read: list[str]

    @cached_property
    def with_bugs(self) -> list[tuple[Audited, Bug]]:
        """The worst harm first."""
        found = [(each, bug) for each in self.audited for bug in each.bugs or ()]
        return sorted(found, key=lambda one: pages.by_harm(one[1].patch))

    @cached_property
    def not_looked_up(self) -> list[Audited]:
        return [each for each in self.audited if each.reason]

    @property
    def newer(self) -> int:
        """How many of these are newer than what was read."""
        return sum(each.newest_read is not None for each in self.not_looked_up)

    @property
    def status(self) -> int:
        """0 only where everything that names a framework was looked up, and has no known bug."""
        return 2 if self.not_read else int(bool(self.with_bugs or self.not_looked_up or self.unread))


def _audit(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    for name in options.ignore:
        find(name, registered, failures)
    readings, not_read = _read(options.file)
    for text in not_read:
        output.complain(text)
    if readings:
        named = [pin for reading in readings for pin in reading.pins]
        unread = [each for reading in readings for each in reading.unread]
        audited = [_without(each, options.ignore) for each in audit.audit(named, registered)]
        findings = _Findings(len(named), audited, audit.that_count(unread, registered), not_read)
        if options.json:
            print(json.dumps(_as_json(findings), indent=2))
        elif options.quiet:
            _complain(findings)
        else:
            _say(findings)
    output.complain_of_plugins(failures)
    return findings.status if readings else 2


def _read(files: Sequence[str]) -> tuple[list[pin_files.Reading], list[str]]:
    if not files:
        return [pin_files.installed()], []
    readings, not_read = [], []
    for file in files:
        try:
            reading = pin_files.read(file)
        except pins.PinsError as error:
            not_read.append(str(error))
            continue
        readings.append(reading)
        if not any(pin.version for pin in reading.pins):
            what = "standard input" if file == "-" else file
            not_read.append(f"{what} pins nothing: {pins.EXPECTED}")
    return readings, not_read


def _without(audited: Audited, ignored: list[str]) -> Audited:
    bugs = audited.bugs and tuple(bug for bug in audited.bugs if bug.patch.name not in ignored)
    return replace(audited, bugs=bugs)


def _complain(findings: _Findings) -> None:
    for each, bug in findings.with_bugs:
        facts = "; ".join(filter(None, (bug.patch.harm, f"fixed in {_fixed(bug)}" if bug.fixed else _fixed(bug))))
        output.complain(f"{each.pin.name} {each.pin.version} ({each.pin.place}): {bug.patch.name}: {facts}")
    for line in _not_looked_up(findings):
        output.complain(line)


def _say(findings: _Findings) -> None:
    rows = findings.with_bugs
    if rows:
        output.print_table(
            ("PACKAGE", "VERSION", "HARM", "BUG", "FIXED IN", "WHERE"),
            [
                (
                    *(each.pin.name, printable(each.pin.version or "")),
                    *(bug.patch.harm, bug.patch.name, _fixed(bug), _where(each)),
                )
                for each, bug in rows
            ],
            [(printable(pages.bug(bug.patch) + registry.credit(bug.plugin)),) for _, bug in rows],
        )
        print()
    for line in _not_looked_up(findings):
        print(printable(line))
    print(_counted(findings))
    if not rows:
        return
    names = {each.pin.name for each, _ in rows}
    repaired = {bug.patch.name for _, bug in rows if bug.repaired_by}
    advice = {bug.patch.name for _, bug in rows} - repaired
    said = pages.counted({bug.patch.name: bug.patch for _, bug in rows}.values())
    found = f"Found {plural(len(repaired | advice), 'known bug')} in {plural(len(names), 'package')}"
    print(f"{found}{f': {said}' if said else ''}.")
    if repaired:
        which = f"{len(repaired)} of them" if advice else "them"
        print(f"rlhf-patches repairs {which} at run time where it is on: `explain BUG` says how, `doctor` whether.")
    for name in sorted(advice):
        print(f"Nothing repairs {name}: `explain {name}` says what to do.")


def _not_looked_up(findings: _Findings) -> list[str]:
    """A line for each pin that was not looked up and each entry that was not understood, up to a number of these."""
    lines = []
    for each in findings.not_looked_up:
        version = f" {each.pin.version}" if each.newest_read else ""
        lines.append(f"{each.pin.name}{version} ({each.pin.place}) was not looked up: {each.reason}")
    lines += [f"{each.place}: {each.why}" for each in findings.unread[:_SHOWN]]
    more = len(findings.unread) - _SHOWN
    return lines + ([f"{more} more were not understood"] if more > 0 else [])


def _counted(findings: _Findings) -> str:
    """One line: how much of what was given was looked up."""
    of_ours, not_up = findings.audited, findings.not_looked_up
    newer = findings.newer
    why = [f"{newer} newer than what was read"] if newer else []
    why += [f"{len(not_up) - newer} without a version that can be looked up"] if len(not_up) > newer else []
    why += [f"{plural(len(findings.unread), 'entry', 'entries')} not understood"] if findings.unread else []
    reasons = f": {', '.join(why)}" if why else ""
    if not of_ours:
        return f"None of the {plural(findings.named, 'package')} named is one that patches are for{reasons}."
    if findings.with_bugs or why:
        looked_up = f"Looked up {len(of_ours) - len(not_up)} of {plural(len(of_ours), 'entry', 'entries')}"
        return f"{looked_up} that patches are for, of {findings.named} named{reasons}."
    return f"No known bugs found in {plural(len(of_ours), 'package')} that patches are for, of {findings.named} named."


def _fixed(bug: Bug) -> str:
    return bug.fixed or ("no release yet" if bug.read else "unknown")


def _where(audited: Audited) -> str:
    return printable(f"{audited.pin.place}{f' ({audited.pin.note})' if audited.pin.note else ''}")


def _as_json(findings: _Findings) -> dict[str, Any]:
    not_up = findings.not_looked_up
    return {
        "dependencies": [_dependency(each) for each in findings.audited],
        "fixes": [],
        "not_understood": [{"place": each.place, "reason": each.why} for each in findings.unread[:_SHOWN]],
        "not_read": findings.not_read,
        "summary": {
            "named": findings.named,
            "frameworks": len(findings.audited),
            "looked_up": len(findings.audited) - len(not_up),
            "newer": findings.newer,
            "not_looked_up": len(not_up),
            "not_understood": len(findings.unread),
        },
    }


def _dependency(audited: Audited) -> dict[str, Any]:
    pin = audited.pin
    row: dict[str, Any] = {"name": pin.name, "place": pin.place, "note": pin.note}
    if audited.reason:
        row["skip_reason"] = audited.reason
    if audited.newest_read:
        row["newest_read"] = audited.newest_read
        row["still_open"] = list(map(_bug_as_json, audited.still_open))
    if audited.bugs is not None or audited.newest_read:
        row["version"] = pin.version
    if audited.bugs is not None:
        row["vulns"] = list(map(_bug_as_json, audited.bugs))
    return row


def _bug_as_json(bug: Bug) -> dict[str, Any]:
    return {
        "id": bug.patch.name,
        "fix_versions": [bug.fixed] if bug.fixed else [],
        "aliases": list(bug.patch.references),
        "harm": bug.patch.harm or None,
        "bug": bug.patch.bug or None,
        "when": bug.patch.when or None,
        "description": bug.patch.symptom,
        "repaired_by": bug.repaired_by,
        **({"what_to_do": bug.patch.what_to_do} if isinstance(bug.patch, Advice) else {}),
        "newest_read": bug.read,
    }
