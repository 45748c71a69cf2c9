"""Metrics of tokens of which there may be none."""

from __future__ import annotations

import math
from typing import Union

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
