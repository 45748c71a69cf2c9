"""Log-probabilities and entropies of the logits in verl's Megatron workers: the replacements of verl's functions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from megatron.core import parallel_state

from .._vocab_parallel.entropy import token_entropy
from .._vocab_parallel.logprob import minus_cross_entropy, token_logprobs


class Both(NamedTuple):
    """Log-probabilities in float32 and entropies in the logits' dtype, of the same logits."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


def log_probs_and_entropy(logits: torch.Tensor, label: torch.Tensor) -> Both:
    """Both quantities in one pass with one backward, where verl computes the entropy first.

    Args:
        logits: ``[..., V / TP]``; not modified.
        label: ``[...]``, indices in the whole vocabulary.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    log_probs, entropy = minus_cross_entropy(logits, label, group, with_entropy=True)
    assert entropy is not None
    return Both(log_probs, entropy.to(logits.dtype))


def log_probs_from_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``vocab_parallel_log_probs_from_logits``."""
    log_probs, _ = minus_cross_entropy(logits, labels, parallel_state.get_tensor_model_parallel_group())
    return log_probs


def log_probs_before_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``vocab_parallel_log_probs_from_logits`` in one pass with the entropies that verl computes later."""
    group = parallel_state.get_tensor_model_parallel_group()
    start = torch.distributed.get_rank(group) * logits.shape[-1]
    return token_logprobs(
        logits, labels, start, start + logits.shape[-1], group, with_entropy=True, of_cross_entropy=True
    )


def entropy(vocab_parallel_logits: torch.Tensor) -> torch.Tensor:
    """``vocab_parallel_entropy``, which returns what `log_probs_before_entropy` has computed."""
    found = token_entropy(vocab_parallel_logits, parallel_state.get_tensor_model_parallel_group())
    return found.to(vocab_parallel_logits.dtype)


def entropy_with_chunking(vocab_parallel_logits: torch.Tensor, chunk_size: int = 2048) -> torch.Tensor:
    """``vocab_parallel_entropy_with_chunking`` in one call, which needs no more memory than one of verl's chunks.

    The result has the default dtype; each entropy is rounded to the dtype of the logits first.
    """
    return entropy(vocab_parallel_logits).to(torch.get_default_dtype())
