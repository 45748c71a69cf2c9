"""What a run met of the bugs that are repaired in it: one line, from the rows of a report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .listed import PATCH
from .words import plural, printable

if TYPE_CHECKING:
    from .status import PatchReport

_NAMED = 5
"""Bugs that cannot tell, by name; a report has all."""


def verdict(rows: Iterable[PatchReport]) -> str | None:
    """Which of the repaired bugs this process met, which it never met, and which cannot tell.

    Returns:
        one line; None where no repaired or observed function ran.
    """
    rows = [*rows]
    advised = [row for row in rows if row.status.value == "advice" and row.was_met]
    rows = [row for row in rows if row.kind == PATCH and row.status.value in ("applied", "observed")]
    if not advised and not any(row.ran for row in rows):
        return None
    met = [row for row in rows if row.was_met]
    # Of those whose condition was told in some calls and not in others, too.
    cannot_tell = [r for r in rows if r.reached is not None and not r.was_met and r.reached.asked < r.reached.calls]
    kind = "observed" if any(row.status.value == "observed" for row in rows) else "repaired"
    text = f"{len(met) or 'none'} of {plural(len(rows), f'{kind} bug')} {'were' if len(met) > 1 else 'was'} met"
    if met:
        text += ": " + ", ".join(f"{row.name}{row.reached.by_how_much if row.reached else ''}" for row in met)
    if never := len(rows) - len(met) - len(cannot_tell):
        text += f"; {'the other ' if not cannot_tell else ''}{never} never" if met or cannot_tell else ""
    if cannot_tell:
        names = ", ".join(row.name for row in cannot_tell[:_NAMED])
        more = f" and {len(cannot_tell) - _NAMED} more" if len(cannot_tell) > _NAMED else ""
        text += f"; {len(cannot_tell)} ran and cannot tell: {names}{more}"
    if advised:
        unrepaired = f"met and not repaired: {', '.join(row.name for row in advised)}"
        text = f"{text}; {unrepaired}" if rows else unrepaired
    return printable(text)
