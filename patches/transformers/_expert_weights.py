"""Routing weights under expert parallelism: each rank's part of their gradient is summed before it is masked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import rlhf_patches

NAME = "transformers-expert-parallel-gradient"

_before: Any = WeakTensorKeyDictionary()
"""By what the router's hook returned: the routing weights before it, and where they belong to other ranks' experts."""


def masked(weights: torch.Tensor, elsewhere: torch.Tensor) -> torch.Tensor:
    """The routing weights with zeros for the experts of other ranks, as released."""
    found = weights.masked_fill(elsewhere, 0.0)
    if found.requires_grad and not torch.compiler.is_compiling():
        _before[found] = (weights, elsewhere)
    return found


def summed(sum_backward: Callable[..., Any], weights: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The same numbers. Their gradient is summed over the ranks, of which each has that of its own experts.

    The release sums the gradient of what is masked: the mask then keeps this rank's part alone.
    """
    before = _before.pop(weights, None)
    if before is None:
        return sum_backward(weights, mesh)
    unmasked, elsewhere = before
    rlhf_patches.decided(NAME, True)
    return sum_backward(unmasked, mesh).masked_fill(elsewhere, 0.0)
