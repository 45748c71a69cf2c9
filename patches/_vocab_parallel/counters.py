"""Counts how often backward wrote the gradient into the logits' memory, how often it did not, and why."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT = 1.0
"""Seconds. A lost count costs less than a run that waits."""

_lock = threading.RLock()  # a signal handler that reports may interrupt its own thread during a count
# A forked child must not inherit it while another thread of the parent holds it.
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.RLock()))
_in_place = 0
_refused: Counter[str] = Counter()


@contextmanager
def locked() -> Iterator[None]:
    """The lock of these counters and of similar ones, with a wait of at most `TIMEOUT`."""
    lock = _lock
    held = lock.acquire(timeout=TIMEOUT)
    try:
        yield
    finally:
        if held:
            lock.release()


def count(refusal: str | None) -> None:
    """Count one backward: in place, or out of place for the given reason."""
    global _in_place
    with locked():
        if refusal is None:
            _in_place += 1
        else:
            _refused[refusal] += 1


def observed() -> dict[str, int]:
    """The counts of this process so far, for ``Patch.observations``.

    Returns:
        For example ``{"backward in place": 3, "backward out of place because the logits are a leaf": 1}``; without
        counts of 0.
    """
    with locked():
        found = {"backward in place": _in_place} if _in_place else {}
        return {
            **found,
            **{f"backward out of place because {reason}": number for reason, number in list(_refused.items())},
        }


def reset() -> None:
    """Reset all counts (for tests)."""
    global _in_place
    with locked():
        _in_place = 0
        _refused.clear()
