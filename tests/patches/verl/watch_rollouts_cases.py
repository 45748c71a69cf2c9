"""What watch_rollouts_ranks.py trains: settings of verl, and the patches that are on."""

from __future__ import annotations

_WATCH, _REPAIR = "verl-watch-rollouts", "verl-merged-lora"

OLDER: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "lost adapter": ({}, (_WATCH,)),
    "repaired": ({}, (_WATCH, _REPAIR)),
    "not watched": ({}, (_REPAIR,)),
    "no log-probabilities": ({"actor_rollout_ref.rollout.calculate_log_probs": False}, (_WATCH,)),
    "no correction": ({"algorithm.rollout_correction": None}, (_WATCH,)),
    "lost buckets": ({"actor_rollout_ref.model.lora.merge": False}, (_WATCH,)),
    "whole adapter": ({"actor_rollout_ref.model.lora.merge": False}, (_WATCH, "verl-lora-buckets")),
    "temperature": ({"actor_rollout_ref.rollout.temperature": 0.7}, (_WATCH,)),
}
"""With `RayPPOTrainer` of a release that has the bug."""

NEWER: dict[str, tuple[str, bool]] = {
    "sync, lost adapter": ("PPOTrainerSync", True),
    "sync, right": ("PPOTrainerSync", False),
    "colocated, lost adapter": ("PPOTrainerColocateAsync", True),
}
"""With the newest release's trainers: which, and whether the engine has lost its adapter."""
