"""What `openrlhf-watch-rollouts` reads in the process that drives a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import watching

from .._rollouts import differences, figures, samples
from .watch_rollouts import NAME, WATCH

_difference = figures.log_probabilities(NAME, WATCH.points_to)
FIGURES = (_difference,)


def observed() -> dict[str, Any]:
    """The figures noted so far in this process."""
    return watching.observed(*FIGURES)


def around_make_experience(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`RemoteExperienceMaker.make_experience`, which adds the actor's log-probabilities to a batch of rollouts."""
    made = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        if _by_these_weights(instance.strategy.args):
            parts = [
                (each.action_log_probs, each.rollout_log_probs, each.action_mask)
                for each in made
                if getattr(each, "rollout_log_probs", None) is not None
            ]
            value = differences.mean_of(parts)
            if value is not None:
                _difference.note(value, run=instance)
    return made


def _by_these_weights(args: Any) -> bool:
    """Whether all rollouts come from the weights that are trained, sampled from their full distribution."""
    at_once = _setting(args, "rollout", "vllm_generate_batch_size", "vllm_generate_batch_size")
    batch = _setting(args, "rollout", "batch_size", "rollout_batch_size")
    return (
        _setting(args, "train", "async_enable", "async_train") is False
        and (at_once is None or at_once == batch)
        and samples.is_whole({name: _setting(args, "rollout", name, name) for name in ("top_p", "top_k")})
    )


def _setting(args: Any, group: str, name: str, flat: str) -> Any:
    """A setting, which is in a group since 0.10.2."""
    return getattr(getattr(args, group), name, None) if hasattr(args, group) else getattr(args, flat, None)
