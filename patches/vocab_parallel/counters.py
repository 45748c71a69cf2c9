"""How often backward wrote the gradient into the logits' own memory, how often not, and why not."""

from __future__ import annotations

import os
import threading
from collections import Counter

_lock = threading.Lock()
# A forked child must not inherit it while another thread of the parent holds it.
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock()))
_in_place = 0
_refused: Counter[str] = Counter()


def count(refusal: str | None) -> None:
    """Note one backward: in place, or out of place for the reason given."""
    global _in_place
    with _lock:
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
    with _lock:
        found = {"backward in place": _in_place} if _in_place else {}
        return {**found, **{f"backward out of place because {reason}": number for reason, number in _refused.items()}}


def reset() -> None:
    """Start counting from nothing (for tests)."""
    global _in_place
    with _lock:
        _in_place = 0
        _refused.clear()
