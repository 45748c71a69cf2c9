"""What watch_rollouts_ranks.py runs: whether the engine is refitted, and the settings; ``(group, name), flat name``."""

from __future__ import annotations

from typing import Any

_LOST: dict[str, Any] = {"refit": False}

CASES: dict[str, dict[str, Any]] = {
    "lost weights": _LOST,
    "right": {},
    "not watched": {"watched": False},
    "lost, not watched": {**_LOST, "watched": False},
    "asynchronous": {**_LOST, "settings": {"asynchronous": True}},
    "more at once": {**_LOST, "settings": {"at once": 64}},
    "top-p": {**_LOST, "settings": {"top-p": 0.9}},
    "limit set": {**_LOST, "limits": "log-probabilities=inf"},
    "without log-probabilities": {**_LOST, "without": True},
}
