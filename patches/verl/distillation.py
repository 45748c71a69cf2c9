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


def average(values: torch.Tensor) -> Union[float, list[float]]:
    """As a metric of verl's: a number, or the list of none where there are no values."""
    return values.float().mean().item() if values.numel() else []


def with_numbers_of_the_mini_batch(config: Any, data: Any) -> Any:
    """An actor's configuration, once it has what ``agg_loss`` averages over; ``ppo_loss`` puts the same there."""
    numbers = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    config.global_batch_info.update(numbers, loss_scale_factor=config.loss_scale_factor)
    return config
