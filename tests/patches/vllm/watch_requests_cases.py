"""What watch_requests_ranks.py runs on one engine, in this order.

A case is rounds of a trainer's: an adapter comes, or several, and then four requests begin.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        asks: how many of the four requests of each round are for the adapter.
        sent: how the adapter comes: "colocate" and "server" are ms-swift's ways; "folder" is from a folder.
        adapters: how many come in each round.
        idle: whether ranks without work compute a batch in place of the requests.
        watched: whether the watch is on.
        limits: RLHF_PATCHES_LIMITS.
    """

    asks: tuple[int, ...] = (0, 0, 0, 0)
    sent: str = "colocate"
    adapters: int = 1
    idle: bool = False
    watched: bool = True
    limits: str = ""


CASES = {
    "lost": Case(),
    "lost, sent to a server": Case(sent="server"),
    "lost, not watched": Case(watched=False),
    "used": Case(asks=(4, 4, 4, 4)),
    "used, not watched": Case(asks=(4, 4, 4, 4), watched=False),
    "used later": Case(asks=(0, 0, 4, 0, 0, 0)),
    "used by some": Case(asks=(1, 0, 0, 0)),
    "in parts": Case(asks=(0, 0), adapters=4),
    "one round": Case(asks=(0,)),
    "idle": Case(idle=True),
    "from a folder": Case(sent="folder"),
    "limit set": Case(asks=(0, 0, 0), limits="unused-adapters=3"),
    "more than that": Case(asks=(0, 0, 0, 0, 0), limits="unused-adapters=3"),
}
WRONG = {"lost": 3, "lost, sent to a server": 3, "more than that": 4}
"""Those that are told, and after how many adapters."""
