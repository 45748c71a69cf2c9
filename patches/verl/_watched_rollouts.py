"""What `verl-watch-rollouts` reads in the trainer's process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from rlhf_patches import watching

from .._rollouts import figures, samples
from .watch_rollouts import NAME, OTHER_POLICY

_MEAN, _VALID = (f"training/rollout_probs_diff_{name}" for name in ("mean", "valid"))
_KL = "rollout_corr/kl"

_difference = figures.log_probabilities(NAME, OTHER_POLICY)
FIGURES = (_difference,)
_running: ContextVar[Any] = ContextVar("running", default=None)


def observed() -> dict[str, Any]:
    """The figures noted so far in this process."""
    return watching.observed(*FIGURES)


def around_fit(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A trainer's ``fit``; verl's other trainers, whose rollouts may be older, have a ``fit`` of their own."""
    token = _running.set(instance)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _running.reset(token)


def around_log(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`Tracking.log`, which receives the metrics of a step or of a validation."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        data, step, *_ = args
        trainer = _running.get()
        valid = data.get(_VALID, 1)
        there = trainer is not None and _is_number(data.get(_MEAN)) and _is_number(valid) and valid == 1
        if there and _is_the_policys(trainer):
            _difference.note(_at_least(data), f"step {step}", trainer)
    return result


def _at_least(data: Mapping[str, Any]) -> float:
    """A lower bound of the mean |log p - log q|."""
    if math.isnan(data[_MEAN]):
        return float(data[_MEAN])
    more: Any = data.get(_KL)
    return float(max(data[_MEAN], abs(more) if _is_number(more) and math.isfinite(more) else 0.0))


def _is_the_policys(trainer: Any) -> bool:
    """Whether the rollouts' log-probabilities must agree with the trainer's."""
    config = trainer.config
    rollout = config.actor_rollout_ref.rollout
    sampling = {name: rollout.get(name) for name in ("temperature", "top_p", "top_k")}
    if not samples.is_plain(sampling) or rollout.get("do_sample") is False:
        return False
    kept = (rollout.get("skip"), *(config.get("skip") or {}).values())
    if rollout.get("skip_rollout") or any(each.get("enable") for each in kept if hasattr(each, "get")):
        return False
    mode = getattr(trainer, "trainer_mode", None)  # of v1
    return mode is None or (mode == "sync" and not _sampler_of_ones_own(config))


def _sampler_of_ones_own(config: Any) -> bool:
    return bool((config.trainer.v1.sampler.get("custom_sampler") or {}).get("path"))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
