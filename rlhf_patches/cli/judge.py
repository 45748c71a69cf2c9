"""``doctor`` and ``check``: what each patch would do in this environment, or in a release that is not installed."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path

from .. import autoload, settings
from .._version import __version__
from ..definitions import pages, registry
from ..definitions.listed import WATCH
from ..definitions.status import PatchReport, Report, Status, folded
from ..definitions.words import plural, printable
from ..offline import confined, download, evaluate, members
from ..runs import hook_files
from . import output
from .command_line import Commands, add_output

_NOTHING_FOUND = (
    "contains no package of a supported framework. Give the directory that holds the packages: the root of a "
    "checkout, or site-packages"
)


def add(commands: Commands) -> None:
    """Declare the commands."""
    command = commands.add(
        "doctor",
        _doctor,
        "show what each patch would do in this environment, and why",
        "rlhf-patches doctor || echo 'problems, see above'",
    )
    add_output(command)
    output.add_details(command)
    command = commands.add(
        "check",
        _check,
        "show what each patch would do in a release, from its source alone; nothing is imported or run",
        "rlhf-patches check verl==0.9.1 megatron_core-0.16.1-cp311-cp311-linux_x86_64.whl ~/Megatron-LM",
    )
    command.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="a wheel, an sdist, a directory, or NAME==VERSION (fetched with pip)",
    )
    add_output(command)
    output.add_details(command)
    command.add_argument(
        "--cache", metavar="DIR", help="where fetched wheels are kept (default: ~/.cache/rlhf-patches)"
    )


def _doctor(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    report = evaluate.inspect(registered, failures)
    bad = bool(report.problems or failures)
    if options.json:
        output.print_json(report)
        return int(bad)
    if options.quiet:
        output.complain_of_patches(report)
        output.complain_of_plugins(failures)
        return int(bad)
    console = output.console()
    output.print_sum(report, _next_step(report))
    console.print()
    output.print_report(report, options, fold=_folded, hidden=_is_elsewhere)
    console.print()
    console.print(printable(f"rlhf-patches {__version__}, Python {sys.version.split()[0]} ({sys.executable})"))
    console.print(printable(_hook_state()), soft_wrap=True)
    for name in settings.KNOWN:
        value = os.environ.get(settings.PREFIX + name)
        if value is not None:
            console.print(printable(f"{settings.PREFIX}{name}={value}"))
    output.complain_of_plugins(failures)
    return int(bad)


def _is_elsewhere(row: PatchReport) -> bool:
    """Whether no installed package has the bug; code that has the bug outside the range counts as having it."""
    return row.status in (Status.ABSENT, Status.UNAFFECTED) and not row.unreviewed


def _folded(rows: list[PatchReport]) -> list[str]:
    others = sum(row.status is Status.UNAFFECTED and row.kind != WATCH for row in rows)
    lines = [f"{plural(others, 'known bug')} in other releases of the installed packages: see `--all`"] * bool(others)
    return [*lines, *folded(row for row in rows if row.status is Status.ABSENT)]


def _next_step(report: Report) -> str:
    if report.problems:
        return f"`rlhf-patches explain {report.problems[0].name}` shows the bug that a refused patch leaves in place"
    applies = report.with_status(Status.APPLIES)
    if applies:
        first = min(applies, key=pages.by_harm).name
        return f"`rlhf-patches explain {first}` shows the first, `rlhf-patches run -- COMMAND` runs with the patches"
    return "`rlhf-patches audit FILE` and `rlhf-patches check NAME==VERSION` check releases that are not installed here"


def _check(options: argparse.Namespace) -> int:
    registered, failures = registry.load()
    cache = Path(options.cache) if options.cache else None
    rows: list[dict[str, object]] = []
    bad, unreadable = bool(failures), False
    for source in options.source:
        try:
            checked = confined.check(download.path_of(source, cache), registered, failures)
        except (download.DownloadError, members.ReleaseError) as error:
            output.complain(str(error))
            unreadable = True
            continue
        report = checked.report
        if not checked.is_patched:
            output.complain(f"{source} {_NOTHING_FOUND}")
            unreadable = True
        bad = bad or bool(report.problems)
        rows += [{**row.to_dict(), "source": source} for row in report]
        if options.quiet:
            output.complain_of_patches(report, source)
        elif not options.json and checked.is_patched:
            output.console().print(printable(source), style="bold")
            output.print_report(report, options, fold=functools.partial(_others, len(report.patches)))
            print()
    if options.json:
        print(json.dumps(rows, indent=2))
    output.complain_of_plugins(failures)
    return 2 if unreadable else int(bad)


def _others(count: int, absent: list[PatchReport]) -> list[str]:
    other = "other modules" if len(absent) < count else "modules that this release does not have"
    return [f"{len(absent)} patches of {other}: absent"] * bool(absent)


def _hook_state() -> str:
    file = hook_files.active()
    outside = hook_files.outside()
    if file is None and outside:
        return (
            f"site hook: none. {outside} is in a folder where Python runs no .pth files (pip install --target, "
            "PYTHONPATH); `rlhf-patches autoload on` writes a hook into site-packages, which must hold the package too"
        )
    if file is None:
        return "site hook: none (editable install); `rlhf-patches autoload on` writes the hook"
    problems = autoload.problems(file)
    if problems:
        return f"site hook: {file}, but {'; '.join(problems)}"
    if autoload.status().switched_on:
        return f"site hook: on for every process of this environment ({file})"
    return f"site hook: installed, active if RLHF_PATCHES_AUTOLOAD=1 ({file})"
