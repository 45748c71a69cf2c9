"""What `nemo-rl-watch-rollouts` reads in the process that drives a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_patches import watching

from .._rollouts import differences, figures
from .watch_rollouts import NAME

_OF_THE_STEP = "max_seq_mult_prob_error"
_STALE = "avg_trajectory_age"

_difference = figures.log_probabilities(NAME, ())
FIGURES = (_difference,)
_found: list[float] = []
"""The value of the current step, until the step's metrics show which kind of step it is."""


def observed() -> dict[str, Any]:
    """The figures noted so far in this process."""
    return watching.observed(*FIGURES)


def around_masking(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`compute_and_apply_seq_logprob_error_masking`, which may remove sequences from ``sample_mask``."""
    with watching.looking(NAME):
        _found.clear()
        value = _of(args[0])
        if value is not None:
            _found.append(value)
    return wrapped(*args, **kwargs)


def _of(data: Any) -> float | None:
    trainer, engine, token_mask = (data[name][:, 1:] for name in ("prev_logprobs", "generation_logprobs", "token_mask"))
    rows = data["sample_mask"]
    if not differences.on_host(token_mask, rows):
        return None
    return differences.mean_of([(trainer, engine, token_mask * rows.unsqueeze(-1))])


def around_log_metrics(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`Logger.log_metrics`, which receives a step's metrics at its end."""
    with watching.looking(NAME):
        metrics, step, prefix = args[:3]
        if _OF_THE_STEP in metrics and _found:
            value = _found.pop()
            if prefix == "train" and _STALE not in metrics:
                _difference.note(value, f"step {step}", instance)
    return wrapped(*args, **kwargs)
