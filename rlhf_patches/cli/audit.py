"""``audit``: known bugs of a lock file, a requirements file or this environment, in the manner of pip-audit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from packaging.version import Version

from ..definitions import registry
from ..definitions.listed import WATCH
from ..definitions.patch import Advice
from ..definitions.words import plural, printable
from ..offline import audit, audit_sarif, audit_text, pin_files, pins
from ..offline.audit import Audited, Bug, Findings, Gap
from ..offline.pairs import Failing
from ..offline.run_config import RunConfig
from ..offline.run_yaml import RunConfigError
from . import output
from .catalogue import find
from .command_line import Commands, add_output

_SHOWN = 3  # versions of a row
_LONGEST_NOTE = 100  # characters; uv's markers have a thousand
_FORMATS = ("text", "json", "sarif", "github", "markdown")


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "audit",
        _audit,
        "list the known bugs of the versions in a file or this environment, and the release that fixes each; offline",
        "pip freeze | rlhf-patches audit - || echo 'known bugs, see above'",
        wrong=(pins.PinsError, RunConfigError),
    )
    command.add_argument(
        "file",
        nargs="*",
        metavar="FILE",
        help="requirements or constraints, pyproject.toml, uv.lock, poetry.lock, pdm.lock, Pipfile.lock, pylock.toml, "
        "environment.yml, conda-lock's files, a Dockerfile, the output of `pip list` or `conda list`, also as JSON; "
        "'-': any of these on standard input; without FILE: this environment",
    )
    command.add_argument(
        "--config",
        metavar="CONFIG",
        nargs="+",
        default=[],
        help="configuration of a run: DeepSpeed's JSON, accelerate's YAML, a trainer's arguments as YAML or JSON, or "
        "its command line in a file (also Hydra overrides); bugs that cannot affect the run are not counted",
    )
    add_output(command, _FORMATS)
    command.add_argument(
        "--disable", metavar="NAME", action="append", default=[], help="do not count this patch's bug; repeatable"
    )


def _audit(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    for name in options.disable:
        find(name, registered, failures)
    registered = [item for item in registered if item.patch.kind != WATCH]  # a watch observes runs and is no bug
    run = RunConfig(options.config) if options.config else None
    readings, not_read = _read(options.file)
    for gap in not_read:
        output.complain(gap.text)
    if readings:
        named = [pin for reading in readings for pin in reading.pins]
        unread = [each for reading in readings for each in reading.unread]
        audited = [_without(each, options.disable) for each in audit.audit(named, registered)]
        audited = [each.within(run) for each in audited] if run else audited
        unread = audit.that_count(unread, registered) + (audit.misspelled(named, registered) if options.file else [])
        findings = Findings(options.file, len(named), audited, unread, not_read, run, audit.failing(named, audited))
        if options.quiet:
            _complain(findings)
        else:
            _print(findings, "json" if options.json else options.format)
    output.complain_of_plugins(failures)
    return findings.status if readings else 2


def _read(files: Sequence[str]) -> tuple[list[pin_files.Reading], list[Gap]]:
    if not files:
        return [pin_files.installed()], []
    readings, not_read = [], []
    for file in files:
        what = "standard input" if file == "-" else file
        try:
            reading = pin_files.read(file)
        except pins.PinsError as error:
            not_read.append(Gap(what, str(error)))
            continue
        readings.append(reading)
        if not any(pin.version for pin in reading.pins):
            not_read.append(Gap(what, f"{what} pins nothing: {pins.EXPECTED}"))
    return readings, not_read


def _without(audited: Audited, disabled: list[str]) -> Audited:
    bugs = audited.bugs and tuple(bug for bug in audited.bugs if bug.patch.name not in disabled)
    return replace(audited, bugs=bugs)


def _print(findings: Findings, form: str) -> None:
    if form == "text":
        _print_text(findings)
    elif form == "github":
        print("\n".join(audit_text.github(findings)))
    elif form == "markdown":
        print("\n".join(audit_text.markdown(findings)))
    else:
        made = {"json": _as_json, "sarif": audit_sarif.document}[form](findings)
        print(json.dumps(made, indent=2))


def _complain(findings: Findings) -> None:
    for each, bug in findings.with_bugs:
        beside = f" ({bug.beside})" if bug.beside else ""
        output.complain(f"{each.pin.name} {each.pin.version} ({each.pin.place}): {bug.patch.name}: {bug.facts}{beside}")
    for pair in findings.failing:
        output.complain(pair.text)
    for text in [*(gap.text for gap in findings.gaps), *findings.notes]:
        output.complain(text)


def _print_text(findings: Findings) -> None:
    rows = _rows(findings)
    if rows:
        output.print_table(
            ("PACKAGE", "VERSION", "HARM", "BUG", "FIXED IN", "WHERE"),
            [
                (each[0].pin.name, _versions(each), bug.patch.harm, bug.patch.name, bug.fixed_in, _where(each))
                for each, bug in rows
            ],
            [_below(bug, findings.run) for _, bug in rows],
        )
        print()
    for pair in findings.failing:
        print(printable(pair.text))
    for name, reason, which in dict.fromkeys(
        (bug.patch.name, reason, f"{each.pin.name} {each.pin.version}") for each, bug, reason in findings.excluded
    ):
        output.print_sentence(printable(f"{name} ({which}) cannot affect this run: {reason}"))
    for line in dict.fromkeys([*(gap.text for gap in findings.gaps), *findings.notes, *findings.in_sum()]):
        output.print_sentence(printable(line))
    for line in _next_steps(findings):
        output.print_sentence(line)


def _rows(findings: Findings) -> list[tuple[list[Audited], Bug]]:
    """Each bug once, with the pins that have it."""
    rows: dict[tuple[str, str], tuple[list[Audited], Bug]] = {}
    for each, bug in findings.with_bugs:
        rows.setdefault((bug.patch.name, bug.beside), ([], bug))[0].append(each)
    return list(rows.values())


def _next_steps(findings: Findings) -> Iterator[str]:
    bugs = {bug.patch.name: (each.pin.name, bug) for each, bug in findings.with_bugs}
    repaired = [name for name, (_, bug) in bugs.items() if bug.repaired_by]
    if any(not each.newest_read for each in findings.not_looked_up) or findings.unread:
        yield f"To audit versions that a file does not pin: {pins.NEXT}."
    for package in sorted({package for package, _ in bugs.values()}):
        fixes = [bug.fixed for name, bug in bugs.values() if name == package]
        fixed = [fix for fix in fixes if fix]
        if fixed:
            newest = max(fixed, key=Version)
            which = f"{len(fixed)} of {len(fixes)} known bugs" if len(fixes) > 1 else "the known bug"
            yield f"Upgrade {package} to {newest}, which fixes {which}."
    contested = [name for name in repaired if bugs[name][1].patch.contested]
    if count := len(repaired) - len(contested):
        every = "these bugs" if len(bugs) > 1 else "this bug"
        which = every if count == len(bugs) else f"{count} of {every}"
        yield f"`rlhf-patches autoload on` repairs {which}: see `rlhf-patches explain BUG`."
    if contested:
        yield f"`RLHF_PATCHES_ENABLE={','.join(contested)}` also repairs what upstream contests."
    for name in sorted(bugs.keys() - set(repaired)):
        yield f"No patch repairs {name}: see `rlhf-patches explain {name}` for a workaround."
    if bugs and not findings.run:
        yield "`--config CONFIG` excludes the bugs that your run's configuration rules out."


def _below(bug: Bug, run: RunConfig | None) -> list[str]:
    lines = [bug.wrong]
    lines += [f"this run: {run.undecided(bug.patch)}"] if run else []
    return [printable(line) for line in lines]


def _versions(audited: Sequence[Audited]) -> str:
    versions = list(dict.fromkeys(each.pin.version or "" for each in audited))
    more = f" and {len(versions) - _SHOWN} more" if len(versions) > _SHOWN else ""
    return printable(", ".join(versions[:_SHOWN]) + more)


def _where(audited: Sequence[Audited]) -> str:
    pin = audited[0].pin
    note = pin.note if len(pin.note) <= _LONGEST_NOTE else f"{pin.note[:_LONGEST_NOTE]}..."
    more = f" and {plural(len(audited) - 1, 'more place')}"
    return printable(f"{pin.place}{f' ({note})' if note else ''}{more if len(audited) > 1 else ''}")


def _as_json(findings: Findings) -> dict[str, Any]:
    not_up = findings.not_looked_up
    return {
        "dependencies": [_dependency(each, findings.run) for each in findings.audited],
        "fixes": [],
        "known_to_fail": [_failing(pair) for pair in findings.failing],
        "not_understood": [{"place": each.place, "reason": each.why} for each in findings.shown_unread],
        "not_read": [gap.text for gap in findings.not_read],
        "summary": {
            "named": findings.named,
            "frameworks": len(findings.audited),
            "looked_up": len(findings.audited) - len(not_up),
            "newer": findings.newer,
            "not_looked_up": len(not_up),
            "not_understood": len(findings.unread),
            **({"excluded": len(findings.excluded)} if findings.run else {}),
        },
        **({"config_not_clear": list(findings.notes)} if findings.run else {}),
    }


def _dependency(audited: Audited, run: RunConfig | None) -> dict[str, Any]:
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
        row["vulns"] = [_bug_as_json(bug, run) for bug in audited.bugs]
    if run:
        row["excluded"] = [{"id": bug.patch.name, "reason": reason} for bug, reason in audited.excluded]
    return row


def _failing(pair: Failing) -> dict[str, Any]:
    return {
        "name": pair.pin.name,
        "version": pair.pin.version,
        "place": pair.pin.place,
        "beside": dict(zip(("name", "version"), pair.other, strict=True)),
        "cannot_be_imported": list(pair.entries),
        "lacks": list(pair.lacks),
        "pin": pair.pins or None,
    }


def _bug_as_json(bug: Bug, run: RunConfig | None = None) -> dict[str, Any]:
    return {
        "id": bug.patch.name,
        "fix_versions": [bug.fixed] if bug.fixed else [],
        "aliases": list(bug.patch.references),
        "harm": bug.patch.harm or None,
        "bug": bug.patch.bug or None,
        "when": bug.patch.when or None,
        **({"beside": bug.beside} if bug.beside else {}),
        "description": bug.patch.symptom,
        "repaired_by": bug.repaired_by,
        **({"what_to_do": bug.patch.what_to_do} if isinstance(bug.patch, Advice) else {}),
        "newest_read": bug.read,
        **({"this_run": run.undecided(bug.patch)} if run else {}),
    }
