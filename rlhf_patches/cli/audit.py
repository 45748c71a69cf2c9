"""``audit``: which known bugs a lock file, a requirements file or this environment has, as pip-audit does it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..definitions import pages, registry
from ..definitions.patch import Advice
from ..definitions.status import printable
from ..offline import audit, pins
from ..offline.audit import Audited, Bug
from . import output
from .catalogue import find
from .command_line import Commands, add_output


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
        help="requirements or constraints, pyproject.toml, uv.lock, poetry.lock, pylock.toml; '-': requirements on "
        "standard input (pip freeze); none: this environment",
    )
    add_output(command)
    command.add_argument(
        "--ignore", metavar="NAME", action="append", default=[], help="a patch whose bug does not count; repeatable"
    )


def _audit(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    for name in options.ignore:
        find(name, registered, failures)
    found = [pin for file in options.file for pin in pins.read(file)] if options.file else pins.installed()
    audited = [_without(each, options.ignore) for each in audit.audit(found, registered)]
    if options.json:
        print(json.dumps({"dependencies": [_as_json(each) for each in audited], "fixes": []}, indent=2))
    else:
        _say(audited, len(found), options.quiet)
    output.complain_of_plugins(failures)
    return int(any(each.bugs for each in audited))


def _without(audited: Audited, ignored: list[str]) -> Audited:
    bugs = audited.bugs and tuple(bug for bug in audited.bugs if bug.patch.name not in ignored)
    return Audited(audited.pin, bugs, audited.reason)


def _say(audited: list[Audited], count: int, quiet: bool) -> None:
    rows = [(each, bug) for each in audited for bug in each.bugs or ()]
    if quiet:
        for each, bug in rows:
            output.complain(f"{each.pin.name} {each.pin.version} ({each.pin.place}): {bug.patch.name}")
        return
    if rows:
        output.print_table(
            ("PACKAGE", "VERSION", "BUG", "FIXED IN", "WHERE"),
            [
                (each.pin.name, printable(each.pin.version or ""), bug.patch.name, _fixed(bug), _where(each))
                for each, bug in rows
            ],
            [(printable(pages.summary(bug.patch) + registry.credit(bug.plugin)),) for _, bug in rows],
        )
        print()
    for each in audited:
        if each.bugs is None:
            print(printable(f"{each.pin.name} ({each.pin.place}) was not looked up: {each.reason}"))
    names = {each.pin.name for each, _ in rows}
    repaired = {bug.patch.name for _, bug in rows if bug.repaired_by}
    advice = {bug.patch.name for _, bug in rows} - repaired
    frameworks = len({each.pin.name for each in audited})
    if rows:
        print(f"Found {len(repaired | advice)} known bugs in {_packages(len(names))}.")
        if repaired:
            which = f"{len(repaired)} of them" if advice else "them"
            print(f"rlhf-patches repairs {which} at run time where it is on: `explain BUG` says how, `doctor` whether.")
        for name in sorted(advice):
            print(f"Nothing repairs {name}: `explain {name}` says what to do.")
    else:
        print(f"No known bugs found in {_packages(frameworks)} that patches are for, of {count} named.")


def _packages(count: int) -> str:
    return f"{count} package{'' if count == 1 else 's'}"


def _fixed(bug: Bug) -> str:
    return bug.fixed or ("no release yet" if bug.read else "unknown")


def _where(audited: Audited) -> str:
    return printable(f"{audited.pin.place}{f' ({audited.pin.note})' if audited.pin.note else ''}")


def _as_json(audited: Audited) -> dict[str, Any]:
    pin = audited.pin
    base = {"name": pin.name, "place": pin.place, "note": pin.note}
    if audited.bugs is None:
        return {**base, "skip_reason": audited.reason}
    return {**base, "version": pin.version, "vulns": list(map(_bug_as_json, audited.bugs))}


def _bug_as_json(bug: Bug) -> dict[str, Any]:
    return {
        "id": bug.patch.name,
        "fix_versions": [bug.fixed] if bug.fixed else [],
        "aliases": list(bug.patch.references),
        "description": bug.patch.symptom,
        "repaired_by": bug.repaired_by,
        **({"what_to_do": bug.patch.what_to_do} if isinstance(bug.patch, Advice) else {}),
        "newest_read": bug.read,
    }
