"""What `skyrl-watch-rollouts` reads in the process that drives a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlhf_patches import watching

from .._rollouts import differences, figures, samples
from .watch_rollouts import NAME, WATCH

_DIFFERENCE = "policy/rollout_train_logprobs_abs_diff_mean"
_LOOP = "skyrl.train.trainer"

_difference = figures.log_probabilities(NAME, WATCH.points_to)
FIGURES = (_difference,)


def observed() -> dict[str, Any]:
    """The figures noted so far in this process."""
    return watching.observed(*FIGURES)


def around_forward(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`RayPPOTrainer.fwd_logprobs_values_reward`, which adds the policy's log-probabilities to a batch of rollouts."""
    before = _value(instance)
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        value = _value(instance)
        new = isinstance(value, float) and value is not before and _by_these_weights(instance)
        if new and (not math.isnan(value) or _trains_any(args[0]["loss_mask"])):
            _difference.note(value, f"step {instance.global_step}", instance)
    return result


def _value(trainer: Any) -> Any:
    metrics = getattr(trainer, "all_metrics", None)
    return metrics.get(_DIFFERENCE) if isinstance(metrics, dict) else None


def _by_these_weights(trainer: Any) -> bool:
    """Whether rollouts come from the weights that are trained, sampled from their full distribution."""
    loop = next(kind.__module__ for kind in type(trainer).__mro__ if "train" in vars(kind))
    sampling = trainer.cfg.generator.sampling_params
    whole = loop == _LOOP and samples.is_whole({name: getattr(sampling, name, None) for name in samples.SAMPLING})
    return whole and not getattr(sampling, "additional_kwargs", None)


def _trains_any(mask: Any) -> bool:
    """Whether the batch has a token to train; without one SkyRL's mean is NaN before 0.3.0."""
    return differences.on_host(mask) and bool((mask > 0).any())
