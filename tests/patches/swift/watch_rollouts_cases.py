"""What watch_rollouts_ranks.py runs: the patches that are on, and how its cases differ from a run of ms-swift's own."""

from __future__ import annotations

from typing import Any

_WATCH, _REPAIR, _SEEDS = "swift-watch-rollouts", "swift-lora-counted-twice", "swift-rollout-worker-seed"

RESUMED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "counted twice": ((_WATCH,), {}),
    "repaired": ((_WATCH, _REPAIR), {}),
    "not watched": ((_REPAIR,), {}),
    "corrected": ((_WATCH,), {"rollout_importance_sampling_mode": "token_truncate"}),
    "not logged": ((_WATCH,), {"log_rollout_offpolicy_metrics": False}),
    "older rollouts": ((_WATCH,), {"async_generate": True}),
    "turns": ((_WATCH,), {"enable_server_multi_turn": True}),
    "cold": ((_WATCH,), {"temperature": 0.5}),
    "evaluated": ((_WATCH,), {"evaluated": True}),
}
"""A run with LoRA that was resumed, in a release that then counts the adapter twice."""

GROUPS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "one seed": ((_WATCH,), {}),
    "seeds of their own": ((_WATCH, _SEEDS), {}),
    "certain": ((_WATCH,), {"certain": True}),
    "a part": ((_WATCH,), {"top_k": 50}),
    "images": ((_WATCH,), {"is_multimodal": True}),
}
"""A group of a data-parallel server, one sample of each worker."""

NEWEST: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "lost update": ((_WATCH,), {"lost": True}),
    "right": ((_WATCH,), {}),
}
"""A run of the newest release whose server gets the first update, and loses the others, or gets all."""
