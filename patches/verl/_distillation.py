"""verl's distillation where no token of a micro-batch counts: its metrics, and what its loss is averaged over."""

from __future__ import annotations

import math
from typing import Any, Union

import torch


def smallest(values: torch.Tensor) -> Union[torch.Tensor, float]:
    """The least of all, ``[tokens]``; infinity where there is none, so that it is nobody's least."""
    return values.min() if values.numel() else math.inf


def largest(values: torch.Tensor) -> Union[torch.Tensor, float]:
    """The largest of all; minus infinity where there is none."""
    return values.max() if values.numel() else -math.inf


def with_numbers_of_the_mini_batch(config: Any, data: Any) -> Any:
    """An actor's configuration, once it has what ``agg_loss`` averages over; ``ppo_loss`` puts the same there.

    As it is where a trainer does not set all of them, as ``ppo_loss`` needs.
    """
    try:
        numbers = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    except KeyError:
        return config
    # writes: what `ppo_loss` writes there
    config.global_batch_info.update(numbers, loss_scale_factor=config.loss_scale_factor)
    return config
