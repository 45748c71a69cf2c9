"""How often a repaired place was reached, and whether the bug bit there: as a line, and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .words import finite


class Reached(NamedTuple):
    """How often a repaired place was reached in this process, and whether the bug bit there.

    Attributes:
        calls: of the function, compiled ones not counted.
        asked: in how many of them the bug's condition could be told.
        held: in how many of these it held.
        least, most: by how much, as ``measure`` says it; None where it is no number.
        measure: what the number is, ``divisor x``.
        has_condition: whether the patch tells a condition at all.
    """

    calls: int
    asked: int = 0
    held: int = 0
    least: float | None = None
    most: float | None = None
    measure: str = ""
    has_condition: bool = False

    def __str__(self) -> str:
        return self.said()

    def said(self, ended: bool = False) -> str:
        """A line for people; ``ended``: whether nothing can come any more."""
        if not self.calls:
            return "never reached"
        said = f"reached {self.calls:,} {'time' if self.calls == 1 else 'times'}"
        if not self.has_condition:
            return said
        if not self.asked:
            return f"{said}; whether the bug's condition held could not be told"
        of = "" if self.asked == self.calls else f" of the {self.asked:,} in which it could be told"
        if not self.held:
            end = "" if of else f": {'this run was not affected' if ended else 'not affected so far'}"
            return f"{said}, never with the bug's condition{of}{end}"
        return f"{said}, with the bug's condition in {self.held:,}{of}{self.by_how_much}"

    @property
    def by_how_much(self) -> str:
        """In brackets, where it is a number."""
        if self.least is None or self.most is None:
            return ""
        upto = f" to {self.most:.4g}" if self.most != self.least else ""
        return f" ({self.measure} {self.least:.4g}{upto})"

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        found: dict[str, Any] = {"calls": self.calls}
        if self.has_condition:
            found |= {"asked": self.asked, "held": self.held}
        if self.least is not None and self.most is not None:
            found |= {"least": finite(self.least), "most": finite(self.most), "measure": self.measure}
        return found


def in_all(found: Sequence[Reached]) -> Reached:
    """Of several places, or processes, together."""
    return Reached(
        sum(one.calls for one in found),
        sum(one.asked for one in found),
        sum(one.held for one in found),
        min((one.least for one in found if one.least is not None), default=None),
        max((one.most for one in found if one.most is not None), default=None),
        found[0].measure,
        found[0].has_condition,
    )
