"""What commands print: tables, JSON, complaints. Most of it comes from outside, so it is made printable first."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..definitions.registry import PluginFailure
from ..definitions.status import PatchReport, Report, Status, printable

_COLOURS = {
    Status.APPLIES: "green",
    Status.REFUSED: "bold red",
    Status.FAILED: "bold red",
    Status.DISABLED: "yellow",
    Status.UNAFFECTED: "blue",
    Status.ABSENT: "dim",
}


def console() -> Console:
    """Standard output."""
    # No markup and no emoji names: most of what is printed comes from outside.
    # Piped output is read by programs and logs: no wrapping at 80 columns.
    return Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False, highlight=False)


def columns(*names: str) -> Table:
    """An empty table."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def judgements(rows: Iterable[PatchReport]) -> Table:
    """One line per patch: its status, the version and why."""
    table = columns("PATCH", "STATUS", "VERSION", "WHY")
    for row in rows:
        table.add_row(row.name, coloured(row.status), printable(row.version or "-"), row.why)
        if row.notice:
            table.add_row("", "", "", row.notice)
    return table


def coloured(status: Status) -> Text:
    """A status as a cell."""
    return Text(str(status), style=_COLOURS.get(status, ""))


def print_json(report: Report) -> None:
    """The report as a list of objects, plugins that cannot be used on standard error."""
    print(json.dumps([row.to_dict() for row in report], indent=2))
    complain_of_plugins(report.plugin_failures)


def complain(text: str) -> None:
    """One line on standard error."""
    print(f"rlhf-patches: {printable(text)}", file=sys.stderr)


def complain_of_patches(report: Report, source: str = "") -> None:
    """Each refused or failed patch; ``source`` is the release that it was looked for in."""
    for row in report.problems:
        complain(f"{source + ': ' if source else ''}{row.name} {row.status}: {row.why}")


def complain_of_plugins(failures: Sequence[PluginFailure]) -> None:
    """Each plugin that cannot be used."""
    for failure in failures:
        complain(str(failure))


def printable_lines(text: str) -> str:
    """`printable`, of text whose lines and tabs are to stay."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
