"""Batches of rewards: the number of prompts, each sample's reward, and its group."""

from __future__ import annotations

PER_PROMPT = 4
ESTIMATORS = ("grpo", "gspo", "reinforce_plus_plus_baseline")

_REWARDS = [1.0, 0.0, 0.5, 0.25, 5.0, 5.0, 5.0, -1.0, 2.0, 0.0, 1.5, 3.25]
CASES: dict[str, tuple[int, list[float], list[int | None]]] = {
    "fewer": (3, _REWARDS[:11], [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]),
    "in another order": (3, _REWARDS[:11], [7, 9, 8, 7, 9, 7, 8, 8, 7, 9, 9]),
    "the same total": (3, _REWARDS, [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]),
    "a single one": (2, _REWARDS[:5], [0, 0, 0, 0, 1]),
    "as many as one prompt has": (4, _REWARDS[:4], [0, 1, 0, 2]),
    "one prompt": (3, _REWARDS[:5], [4, 4, 4, 4, 4]),
    # As released.
    "equal": (3, _REWARDS, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]),
    "without groups": (3, _REWARDS[:11], [None] * 11),
    "partly without groups": (3, _REWARDS[:11], [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, None]),
    "always the same group": (3, _REWARDS, [0] * 12),
}
REPAIRED = ("fewer", "in another order", "the same total", "a single one", "as many as one prompt has")
