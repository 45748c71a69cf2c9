"""A limit of time for a rehearsal, which ends the process with status 2."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

FIRST = "first window"
_GRACE = 3.0
"""Seconds by which other ranks wait for rank 0's table."""
_now = FIRST


def at(name: str) -> None:
    """Note the relation that is checked next."""
    global _now
    _now = name


class Limit:
    """Ends the process after some seconds, unless it is cancelled.

    A thread ends it, since a rank that waits for others cannot be interrupted.

    Args:
        seconds: None for no limit.
        expired: called with the name of the relation that was checked.
        first: whether this is rank 0, which writes the results.
    """

    def __init__(self, seconds: float | None, expired: Callable[[str], None], *, first: bool = True) -> None:
        self._expired = expired
        self._timer: threading.Timer | None = None
        at(FIRST)
        if seconds is not None:
            self._timer = threading.Timer(seconds + (0 if first else _GRACE), self._end)
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        try:
            self._expired(_now)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)
