"""The verdict of a run in one line, from the rows of a report: which of the repaired bugs occurred."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .listed import PATCH
from .words import plural, printable

if TYPE_CHECKING:
    from .status import PatchReport

_NAMED = 5
"""The largest number of undecided bugs that are named; a report has all."""


def verdict(rows: Iterable[PatchReport]) -> str | None:
    """Return which of the repaired bugs occurred in this process, which did not, and which are undecided.

    Returns:
        one line; None if no repaired or observed function ran.
    """
    rows = [*rows]
    advised = [row for row in rows if row.status.value == "advice" and row.was_met]
    rows = [row for row in rows if row.kind == PATCH and row.status.value in ("applied", "observed")]
    if not advised and not any(row.ran for row in rows):
        return None
    met = [row for row in rows if row.was_met]
    # Also those whose condition is known only for some calls.
    undecided = [r for r in rows if r.reached is not None and not r.was_met and r.reached.asked < r.reached.calls]
    kind = "observed" if any(row.status.value == "observed" for row in rows) else "repaired"
    occurred = "is known to have occurred" if undecided and not met else "occurred"
    text = f"{len(met) or 'none'} of {plural(len(rows), f'{kind} bug')} {occurred}"
    if met:
        text += ": " + ", ".join(f"{row.name}{row.reached.by_how_much if row.reached else ''}" for row in met)
    if never := len(rows) - len(met) - len(undecided):
        text += f"; {'the other ' if not undecided else ''}{never} did not" if met or undecided else ""
    if undecided:
        names = ", ".join(row.name for row in undecided[:_NAMED])
        more = f" and {len(undecided) - _NAMED} more" if len(undecided) > _NAMED else ""
        text += f"; {len(undecided)} ran, bug condition unknown: {names}{more}"
    if advised:
        unrepaired = f"occurred and not repaired: {', '.join(row.name for row in advised)}"
        text = f"{text}; {unrepaired}" if rows else unrepaired
    return printable(text)
