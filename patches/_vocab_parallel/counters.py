"""How often backward wrote the gradient into the logits' own memory, how often not, and why not."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 1.0
"""Seconds. A count that is lost costs less than a run that waits."""

_lock = threading.RLock()  # a signal's handler that reports may have interrupted its own thread while that counts
# A forked child must not inherit it while another thread of the parent holds it.
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.RLock()))
_in_place = 0
_refused: Counter[str] = Counter()


@contextmanager
def locked() -> Iterator[None]:
    """The lock of these counters and of others like them, waited for no longer than `PATIENCE`."""
    lock = _lock
    held = lock.acquire(timeout=PATIENCE)
    try:
        yield
    finally:
        if held:
            lock.release()


def count(refusal: str | None) -> None:
    """Note one backward: in place, or out of place for the reason given."""
    global _in_place
    with locked():
        if refusal is None:
            _in_place += 1
        else:
            _refused[refusal] += 1


def observed() -> dict[str, int]:
    """What this process has done so far, as ``Patch.observations`` wants it.

    Returns:
        Such as ``{"backward in place": 3, "backward out of place because the logits are a leaf": 1}``; what has not
        happened is left out.
    """
    with locked():
        found = {"backward in place": _in_place} if _in_place else {}
        return {
            **found,
            **{f"backward out of place because {reason}": number for reason, number in list(_refused.items())},
        }


def reset() -> None:
    """Start counting from nothing (for tests)."""
    global _in_place
    with locked():
        _in_place = 0
        _refused.clear()
