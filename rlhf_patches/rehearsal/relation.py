"""What a rehearsal says of one relation."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    """Whether a relation holds for a run."""

    HOLDS = "holds"
    DEVIATES = "deviates"
    NOTE = "note"
    """No fault by itself; worth knowing."""
    NOT_HELD = "not held"
    """It cannot be exact here; the text says why."""


@dataclass(frozen=True)
class Relation:
    """A row of the table.

    Args:
        name: the relation's.
        measured: what was found, in words; empty where nothing was.
        text: what follows from it, or why it was not held.
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


def not_held(name: str, why: str) -> Relation:
    return Relation(name, Verdict.NOT_HELD, text=why)


def micro_batches(number: int) -> str:
    """``1 micro-batch``, ``3 micro-batches``."""
    return f"{number} micro-batch{'es' * (number != 1)}"
