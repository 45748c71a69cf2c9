"""Wrappers of Megatron's cross entropies: their arguments, and the shared pass over the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from .._vocab_parallel.logprob import minus_cross_entropy
from .._vocab_parallel.shared import can_take


def around_cross_entropy(
    wrapped: Callable[..., torch.Tensor], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Wrap ``vocab_parallel_cross_entropy``. Label smoothing uses Megatron's own function."""
    logits, target, smoothing, group = _cross_entropy_of(*args, **kwargs)
    if smoothing > 0:
        return wrapped(*args, **kwargs)
    return _loss(wrapped, logits, target, group, args, kwargs)


def around_fused(
    wrapped: Callable[..., torch.Tensor], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Wrap ``fused_vocab_parallel_cross_entropy``."""
    return _loss(wrapped, *_fused_of(*args, **kwargs), args, kwargs)


def _cross_entropy_of(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor, float, Any]:
    """The arguments in their order; 0.19.0 added the last one."""
    return vocab_parallel_logits, target, label_smoothing, tp_group


def _fused_of(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The same; 0.12.0rc2 added the last one."""
    return vocab_parallel_logits, target, tp_group


def _loss(
    wrapped: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    target: torch.Tensor,
    group: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    if not can_take(logits, target):
        return wrapped(*args, **kwargs)  # for example, Megatron's function broadcasts
    if group is None:
        group = parallel_state.get_tensor_model_parallel_group()
    log_probs, _ = minus_cross_entropy(logits, target, group)
    return 0.0 - log_probs  # for a token with probability 1 this is 0.0, as Megatron's, not -0.0
