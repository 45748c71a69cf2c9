"""What watch_rollouts_ranks.py runs: whether the engine is refitted, the temperature, and what is another's."""

from __future__ import annotations

from typing import Any

_LOST: dict[str, Any] = {"refit": False}

CASES: dict[str, dict[str, Any]] = {
    "lost weights": _LOST,
    "raw log-probabilities": {"temperature": 0.6},
    "right": {},
    "not watched": {"watched": False},
    "lost, not watched": {**_LOST, "watched": False},
    "asynchronous": {**_LOST, "own loop": True},
    "top-p": {**_LOST, "top_p": 0.9},
    "limit set": {**_LOST, "limits": "log-probabilities=inf"},
    "without log-probabilities": {**_LOST, "without": True},
    "nothing to train": {**_LOST, "nothing": True},
}
