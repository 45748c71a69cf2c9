"""verl's distillation where no token of a micro-batch counts: its metrics and the divisor of its loss."""

from __future__ import annotations

import math
from typing import Any, Union

import torch


def smallest(values: torch.Tensor) -> Union[torch.Tensor, float]:
    """The minimum of ``[tokens]``; infinity where there are no tokens."""
    return values.min() if values.numel() else math.inf


def largest(values: torch.Tensor) -> Union[torch.Tensor, float]:
    """The maximum of ``[tokens]``; minus infinity where there are no tokens."""
    return values.max() if values.numel() else -math.inf


def with_numbers_of_the_mini_batch(config: Any, data: Any) -> Any:
    """Write the numbers that ``agg_loss`` averages over into an actor's configuration, as ``ppo_loss`` does.

    Returns the configuration as it is where a trainer does not set all the numbers that ``ppo_loss`` needs.
    """
    try:
        numbers = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    except KeyError:
        return config
    # writes: what `ppo_loss` writes there
    config.global_batch_info.update(numbers, loss_scale_factor=config.loss_scale_factor)
    return config
