"""Output of commands: tables, JSON, complaints. Most text comes from outside, so it is made printable first."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from .. import settings
from ..definitions import pages
from ..definitions.listed import WATCH
from ..definitions.registry import PluginFailure
from ..definitions.status import PatchReport, Report, Status, folded
from ..definitions.words import layout, printable

if TYPE_CHECKING:
    from .terminal import Terminal

_COLORS = {
    Status.APPLIES: "green",
    Status.REFUSED: "bold red",
    Status.FAILED: "bold red",
    Status.ADVICE: "bold yellow",
    Status.DISABLED: "yellow",
    Status.UNAFFECTED: "blue",
    Status.ABSENT: "dim",
}
_FIRST = (Status.REFUSED, Status.FAILED, Status.APPLIES, Status.ADVICE)
"""The statuses at the top of a report: problems that need the user, and patches that apply here."""
_STATUS = re.compile(rf"(?<=  )({'|'.join(_COLORS)})(?=  |$)")


def console() -> Terminal:
    """Standard output."""
    from .terminal import Terminal

    return Terminal()


def print_sentence(text: str, style: str = "") -> None:
    """Print a sentence on standard output, wrapped on a terminal."""
    if sys.stdout.isatty():
        to = console()
        to.print(pages.wrapped(text, to.width), style=style)
    else:
        print(text)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], below: Sequence[Sequence[str]] = ()) -> None:
    """Print rows in columns, each status in its color. Piped output, for programs and logs, has one line per row."""
    from rich.text import Text

    to = console()
    width = to.width if sys.stdout.isatty() else None
    for number, line in enumerate(layout(heads, rows, width, below)):
        text = Text(line, style="" if number else "bold")
        status = _STATUS.search(line)
        if status is not None:
            text.stylize(_COLORS[Status(status.group())], *status.span())
        to.print(text)


def add_details(command: argparse.ArgumentParser, places: bool = True) -> None:
    """Add ``--all`` and ``--long``."""
    command.add_argument(
        "--all",
        action="store_true",
        help="also list patches of other releases, and of absent frameworks",
    )
    if places:
        command.add_argument("--long", action="store_true", help="show file and line of each patched function")


def print_report(
    report: Iterable[PatchReport],
    options: argparse.Namespace,
    heads: Sequence[str] = ("PATCH", "STATUS", "HARM", "VERSION", "WHY"),
    cells: Callable[[PatchReport], Sequence[str]] = lambda row: (*_harm_here(row), row.why),
    below: Callable[[PatchReport], Sequence[str]] | None = None,
    fold: Callable[[list[PatchReport]], list[str]] = folded,
    hidden: Callable[[PatchReport], bool] = lambda row: row.status is Status.ABSENT,
) -> None:
    """Print a table with a row for each patch, and a line for each absent framework.

    Problems come first, then patches that apply here; within a status the worst harm comes first.

    Args:
        report: the patches.
        options: the options of `add_details`.
        heads: the names of the columns.
        cells: the cells of a row after name and status.
        below: the lines below a row.
        fold: the lines for patches without a row.
        hidden: whether a patch has no row without ``--all``.
    """
    rows = sorted(report, key=_rank)
    shown = [row for row in rows if options.all or not hidden(row)]
    lines = [below(row) if below else row.below(getattr(options, "long", False), harm=False) for row in shown]
    if shown:
        print_table(heads, [(row.name, row.status.value, *cells(row)) for row in shown], lines)
    for line in fold([row for row in rows if row not in shown]):
        print_sentence(line, style="dim")


def _rank(row: PatchReport) -> tuple[int, int, str]:
    """The sort key. The harm counts only for bugs in installed packages."""
    if row.status not in _FIRST:
        return len(_FIRST), 0, ""
    return (_FIRST.index(row.status), *pages.by_harm(row))


def _harm_here(row: PatchReport) -> tuple[str, str]:
    return row.harm if row.is_there and row.harm else "-", printable(row.version or "-")


def print_sum(report: Report, next_step: str) -> None:
    """Print the number of patches by status, the harm of bugs present here, and the next step."""
    bugs = [row for row in report if row.kind != WATCH]
    counts = Counter(row.status for row in bugs)
    by_status = ", ".join(f"{status} {counts[status]}" for status in _COLORS if counts[status])
    print_sentence(f"{len(bugs)} known bugs, by status: {by_status or 'none'}", style="bold")
    harm = pages.counted(row for row in report if row.is_there)
    if harm:
        print_sentence(f"In the packages installed here: {harm}.")
    print_sentence(f"Next: {next_step}.")


def print_json(report: Report) -> None:
    """Print the report as a list of objects, and unusable plugins on standard error."""
    print(json.dumps([row.to_dict() for row in report], indent=2))
    complain_of_plugins(report.plugin_failures)


def complain(text: str) -> None:
    """Print one line on standard error, or the several lines of a message of `settings`."""
    lines = settings.LINE.join(printable(line) for line in text.split(settings.LINE))
    print(f"rlhf-patches: {lines}", file=sys.stderr)


def complain_of_patches(report: Report, source: str = "") -> None:
    """Print each refused or failed patch; ``source`` is the release that was checked."""
    for row in report.problems:
        wrong = "".join(f"; {text}" for text in row.below())
        complain(f"{source + ': ' if source else ''}{row.name} {row.status}: {row.why}{wrong}")


def complain_of_plugins(failures: Sequence[PluginFailure]) -> None:
    """Print each plugin that cannot be used."""
    for failure in failures:
        complain(str(failure))


def printable_lines(text: str) -> str:
    """`printable` for text that keeps its lines and tabs."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
