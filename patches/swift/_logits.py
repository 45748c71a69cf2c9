"""What ms-swift's Megatron trainers make of their logits: what its functions are replaced by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed.nn import functional

from .._vocab_parallel.logprob import minus_cross_entropy
from .._vocab_parallel.shared import can_take

_IGNORED = -100


def sum_over_ranks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the tensors of a group's ranks, where each rank goes on to use it in another way.

    Its gradient is the sum of those of all ranks.
    """
    summed: torch.Tensor = functional.all_reduce(tensor, group=group)
    return summed


_Both = tuple[torch.Tensor, "torch.Tensor | None"]


def where_the_vocabulary_is_split(
    wrapped: Callable[..., _Both], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Both:
    """Around ``compute_logps_and_entropy_from_logits`` of 3.12.1 to 4.5.2, which is right on one rank."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return wrapped(*args, **kwargs)
    return logps_and_entropy(wrapped, instance, args, kwargs)


def logps_and_entropy(
    wrapped: Callable[..., _Both], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Both:
    """Around ``compute_logps_and_entropy_from_logits``: both in one pass over the logits, which stay as they are.

    ``args``, of which the last is not used, since blocks are sized by bytes, which changes no result:

    - logits: ``[B, S, V / TP]`` or, packed, ``[1, T, V / TP]``.
    - labels: ``[B, S]`` or ``[1, T]``, shifted already; -100 where there is nothing to predict.
    - whether to return entropies.
    - ms-swift's tokens per chunk of entropies.

    Returns:
        Log-probabilities, float32, 0 where the label is -100; entropies in nats, in the logits' dtype, or None.
    """
    logits, labels, compute_entropy, _ = args
    if not can_take(logits, labels):
        return wrapped(*args, **kwargs)
    ignored = labels == _IGNORED
    log_probs, entropy = minus_cross_entropy(
        logits,
        labels.masked_fill(ignored, 0),
        parallel_state.get_tensor_model_parallel_group(),
        with_entropy=compute_entropy,
    )
    # A product, as ms-swift has it: NaN stays NaN.
    return log_probs * ~ignored, None if entropy is None else entropy.to(logits.dtype)
