"""Replacements for the log-probability and entropy functions of slime's Megatron backend."""

from __future__ import annotations

from typing import Any

import torch

from .._vocab_parallel.entropy import token_entropy
from .._vocab_parallel.logprob import minus_cross_entropy
from .._vocab_parallel.shared import can_take

_Both = tuple[torch.Tensor, "torch.Tensor | None"]


def compute_log_probs(logits: torch.Tensor, tokens: torch.Tensor, process_group: Any) -> torch.Tensor:
    """``compute_log_probs``: ``[T, V / TP]`` to ``[T, 1]``, float32. The logits are not changed."""
    return minus_cross_entropy(logits, tokens, process_group)[0].unsqueeze(-1)


def compute_entropy_from_logits(logits: torch.Tensor, process_group: Any) -> torch.Tensor:
    """``compute_entropy_from_logits``, whose result has the dtype of the logits."""
    return token_entropy(logits, process_group).to(logits.dtype)


def of_megatrons_group(logits: torch.Tensor, tokens: torch.Tensor, with_entropy: bool = False) -> _Both:
    """``calculate_log_probs_and_entropy`` of 0.1.0."""
    from megatron.core import parallel_state

    return whole(logits, tokens, parallel_state.get_tensor_model_parallel_group(), with_entropy)


def whole(logits: torch.Tensor, tokens: torch.Tensor, tp_group: Any, with_entropy: bool = False) -> _Both:
    """``calculate_log_probs_and_entropy`` of 0.2.0 and 0.2.1.

    Returns:
        Log-probabilities ``[T, 1]``, and entropies ``[T]`` or None. Without tokens, both are ``[0]``, as in slime.
    """
    if not len(logits):
        return logits.new_zeros((0,)), logits.new_zeros((0,)) if with_entropy else None
    log_probs, entropy = minus_cross_entropy(logits, tokens, tp_group, with_entropy=with_entropy)
    return log_probs.unsqueeze(-1), None if entropy is None else entropy.to(logits.dtype)


def in_chunks(
    logits: torch.Tensor, tokens: torch.Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1
) -> _Both:
    """``calculate_log_probs_and_entropy`` of 0.2.2 to 0.3.0: all at once, which needs no more memory than a chunk."""
    return whole(logits, tokens, tp_group, with_entropy)


def around_masked(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Both:
    """Wrap ``calculate_log_probs_and_entropy`` since 0.3.1, which itself computes log-probabilities under top-p."""
    logits, tokens, tp_group, with_entropy, _, keep_mask, with_entropy_grad = args
    if keep_mask is not None or not can_take(logits, tokens):
        masked: _Both = wrapped(*args, **kwargs)
        return masked
    log_probs, entropy = whole(logits, tokens, tp_group, with_entropy)
    if entropy is not None and len(logits):
        entropy = entropy.float()
    return log_probs, entropy if entropy is None or with_entropy_grad else entropy.detach()
