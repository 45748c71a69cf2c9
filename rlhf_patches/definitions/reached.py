"""Call counts of a repaired function and of its bug's condition, as a line and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .words import finite


class Reached(NamedTuple):
    """Call counts of a repaired function in this process, and how often its bug occurred.

    Attributes:
        calls: calls of the function, without compiled ones.
        asked: the calls in which the bug's condition is known.
        held: the calls in which it was true.
        least, most: the smallest and largest measure; None if it is not a number.
        measure: the name of the number, ``divisor x``.
        has_condition: whether the patch has a condition.
    """

    calls: int
    asked: int = 0
    held: int = 0
    least: float | None = None
    most: float | None = None
    measure: str = ""
    has_condition: bool = False

    def __str__(self) -> str:
        return self.text()

    def text(self, ended: bool = False) -> str:
        """Return a line for users; ``ended``: whether all processes have ended."""
        if not self.calls:
            return "never called"
        calls = f"called {self.calls:,} {'time' if self.calls == 1 else 'times'}"
        if not self.has_condition:
            return calls
        if not self.asked:
            return f"{calls}; bug condition unknown"
        of = "" if self.asked == self.calls else f" of {self.asked:,} known"
        if not self.held:
            end = "" if of else f": {'this run was not affected' if ended else 'not affected so far'}"
            return f"{calls}; bug condition true in 0{of}{end}"
        return f"{calls}; bug condition true in {self.held:,}{of}{self.by_how_much}"

    @property
    def by_how_much(self) -> str:
        """The measure in brackets; empty if it is not a number."""
        if self.least is None or self.most is None:
            return ""
        upto = f" to {self.most:.4g}" if self.most != self.least else ""
        return f" ({self.measure} {self.least:.4g}{upto})"

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can represent."""
        counts: dict[str, Any] = {"calls": self.calls}
        if self.has_condition:
            counts |= {"asked": self.asked, "held": self.held}
        if self.least is not None and self.most is not None:
            counts |= {"least": finite(self.least), "most": finite(self.most), "measure": self.measure}
        return counts


def in_all(parts: Sequence[Reached]) -> Reached:
    """Sum the counts of several functions or processes."""
    return Reached(
        sum(one.calls for one in parts),
        sum(one.asked for one in parts),
        sum(one.held for one in parts),
        min((one.least for one in parts if one.least is not None), default=None),
        max((one.most for one in parts if one.most is not None), default=None),
        parts[0].measure,
        parts[0].has_condition,
    )
