"""What `slime-watch-rollouts` reads: in a training rank, and in the process that has the rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rlhf_patches import watching

from .._rollouts import figures, samples
from .watch_rollouts import NAME, TOO_LONG

_DIFFERENCE = "train/train_rollout_logprob_abs_diff"
_SAMPLING = ("temperature", "top_p", "top_k")
_OF_OTHERS = ("partial_rollout", "keep_old_actor", "use_rollout_logprobs", "load_debug_rollout_data")
"""Settings with which trainer and engine may legitimately differ, or are not compared."""
_SAMPLING_FUNCTIONS = (
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
)

_difference = figures.log_probabilities(NAME, ())
_long = figures.long_completions(NAME, TOO_LONG)
FIGURES = (_difference, _long)


def observed() -> dict[str, Any]:
    """The figures of this process so far."""
    return watching.observed(*FIGURES)


def around_log(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Wrap `logging_utils.log`, which one rank calls with the metrics of a step."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        settings, metrics, key = args
        value = metrics.get(_DIFFERENCE)
        if isinstance(value, float) and _is_the_policys(settings):
            _difference.note(value, f"step {metrics.get(key)}")
    return result


def around_rollout(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Wrap `_log_rollout_data`, which has the samples of a rollout for training."""
    result = wrapped(*args, **kwargs)
    with watching.looking(NAME):
        number, settings, rollout, *_ = args
        limit = settings.rollout_max_response_len
        own = settings.custom_generate_function_path is None and not settings.load_debug_rollout_data
        if own and _is_slimes_own(settings) and limit is not None:
            _long.note(max([0, *(length - limit for length in _lengths(rollout))]), f"rollout {number}")
    return result


def _lengths(rollout: Any) -> Iterator[int]:
    for sample in rollout:
        if getattr(sample, "generate_function_path", None) is None:
            yield sample.response_length


def _is_the_policys(settings: Any) -> bool:
    """Whether log-probabilities of rollouts must agree with the trainer's."""
    if not settings.colocate or any(getattr(settings, name, None) for name in _OF_OTHERS):
        return False
    return _is_slimes_own(settings) and samples.is_plain(
        {name: getattr(settings, f"rollout_{name}", None) for name in _SAMPLING}
    )


def _is_slimes_own(settings: Any) -> bool:
    """Whether slime samples the rollouts: its other functions use the answers of the data, or a file."""
    return settings.rollout_function_path in _SAMPLING_FUNCTIONS
