"""What watch_rollouts_ranks.py runs: whether the engine is refitted, and what the steps are."""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "lost weights": {"refit": False},
    "right": {},
    "not watched": {"watched": False},
    "lost, not watched": {"refit": False, "watched": False},
    "asynchronous": {"refit": False, "of a step": {"avg_trajectory_age": 1.0}},
    "another algorithm's": {"refit": False, "prefix": ""},
    "sequences masked": {"refit": False, "threshold": 1.0},
    "limit set": {"refit": False, "limits": "log-probabilities=inf"},
    "without log-probabilities": {"refit": False, "takes away": "prev_logprobs"},
}
