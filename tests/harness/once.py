"""What several tests need is made once per session, by the worker process that asks for it first."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def once(folder: Path, key: object, make: Callable[[Path], Any]) -> Any:
    """What ``make`` has returned for that key, in this process or another one.

    Args:
        folder: the same in all processes of a session.
        key: its repr says what is wanted.
        make: gets an empty folder; returns what JSON can hold. If it raises, the next one tries again.
    """
    place = folder / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    made = place / "made.json"
    with open(place / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            out = place / f"out{len(list(place.glob('out*')))}"
            out.mkdir()
            made.write_text(json.dumps(make(out)))
    return json.loads(made.read_text())
