"""What watch_rollouts_ranks.py trains: a case of the engine that sleeps, settings, the patches that are on, limits."""

from __future__ import annotations

from typing import Any

_WATCH = ("trl-watch-rollouts",)
_REPAIRED = (*_WATCH, "trl-vllm-sleep-weights")
_FOUR: dict[str, Any] = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4}

CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "lost weights": ("steps", {}, _WATCH, ""),
    "repaired": ("steps", {}, _REPAIRED, ""),
    "logged later": ("steps", {"logging_steps": 3}, _REPAIRED, ""),
    "not watched": ("steps", {}, _REPAIRED[1:], ""),
    "limit set": ("steps", {}, _WATCH, "log-probabilities=inf"),
    "awake": ("awake", _FOUR, _WATCH, ""),
    "one seed": ("awake", _FOUR, _WATCH, ""),
    "flat": ("awake", _FOUR, _WATCH, ""),
    "too long": ("awake", _FOUR, _WATCH, ""),
    "certain": ("awake", {**_FOUR, "vllm_importance_sampling_correction": False}, _WATCH, ""),
    "ends": ("awake", {**_FOUR, "vllm_importance_sampling_correction": False}, _WATCH, ""),
    "evaluated": ("evaluated", {}, _REPAIRED, ""),
}
