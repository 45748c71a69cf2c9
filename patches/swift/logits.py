"""What ms-swift's Megatron trainers make of their logits: what its functions are replaced by."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed.nn import functional

from ..vocab_parallel.logprob import minus_cross_entropy

_IGNORED = -100


def sum_over_ranks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the tensors of a group's ranks, where each rank goes on to use it in another way.

    Its gradient is the sum of those of all ranks.
    """
    summed: torch.Tensor = functional.all_reduce(tensor, group=group)
    return summed


def logps_and_entropy(
    logits: torch.Tensor, labels: torch.Tensor, compute_entropy: bool = False, entropy_chunk_size: int = 512
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``compute_logps_and_entropy_from_logits``: both in one pass over the logits, which stay as they are.

    Args:
        logits: ``[B, S, V / TP]`` or, packed, ``[1, T, V / TP]``.
        labels: ``[B, S]`` or ``[1, T]``, shifted already; -100 where there is nothing to predict.
        compute_entropy: whether to return entropies.
        entropy_chunk_size: ms-swift's tokens per chunk; not used, blocks are sized by bytes, which changes no result.

    Returns:
        Log-probabilities, float32, 0 where the label is -100; entropies in nats, in the logits' dtype, or None.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    ignored = labels == _IGNORED
    log_probs, entropy = minus_cross_entropy(
        logits,
        labels.masked_fill(ignored, 0),
        parallel_state.get_tensor_model_parallel_group(),
        with_entropy=compute_entropy,
    )
    return log_probs.masked_fill(ignored, 0.0), None if entropy is None else entropy.to(logits.dtype)
