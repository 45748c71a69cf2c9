"""The result of a rehearsal for one relation."""

from __future__ import annotations

import enum
from dataclasses import dataclass

OTHER_LAYOUT = "gradient in another layout"


class Verdict(enum.Enum):
    """Whether a relation holds for a run."""

    HOLDS = "holds"
    DEVIATES = "deviates"
    NOTE = "note"
    """Not an error by itself."""
    NOT_CHECKED = "not checked"
    """It cannot be exact here; the text gives the reason."""


@dataclass(frozen=True)
class Relation:
    """A row of the table.

    Args:
        name: the relation's name.
        measured: the measured value as text; may be empty.
        text: the conclusion, or why it was not checked.
    """

    name: str
    verdict: Verdict
    measured: str = ""
    text: str = ""

    def as_json(self) -> dict[str, str]:
        return {
            "relation": self.name,
            "verdict": self.verdict.value,
            "measured": self.measured,
            "text": self.text,
        }


def not_checked(name: str, why: str) -> Relation:
    return Relation(name, Verdict.NOT_CHECKED, text=why)


def micro_batches(number: int) -> str:
    """``1 micro-batch``, ``3 micro-batches``."""
    return f"{number} micro-batch{'es' * (number != 1)}"
