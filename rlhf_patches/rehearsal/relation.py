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
        deviation: what was measured, in words; empty where nothing was.
        text: what follows from it, or why it was not held.
    """

    name: str
    verdict: Verdict
    deviation: str = ""
    text: str = ""

    def as_json(self) -> dict[str, str]:
        return {
            "relation": self.name,
            "verdict": self.verdict.value,
            "measured": self.deviation,
            "text": self.text,
        }


def not_held(name: str, why: str) -> Relation:
    return Relation(name, Verdict.NOT_HELD, text=why)


def noun(number: int, of: str) -> str:
    """``1 micro-batch``, ``3 micro-batches``."""
    plural = {"micro-batch": "micro-batches"}.get(of, f"{of}s")
    return f"{number} {of if number == 1 else plural}"
