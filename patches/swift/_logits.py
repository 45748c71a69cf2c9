"""Replacements for what ms-swift's Megatron trainers compute from their logits."""

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
    """The sum of the tensors of a group's ranks, if each rank uses it differently afterwards.

    Its gradient is the sum of the gradients of all ranks.
    """
    summed: torch.Tensor = functional.all_reduce(tensor, group=group)
    return summed


_Both = tuple[torch.Tensor, "torch.Tensor | None"]


def where_the_vocabulary_is_split(
    wrapped: Callable[..., _Both], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Both:
    """Wrap ``compute_logps_and_entropy_from_logits`` of 3.12.1 to 4.5.2, which is right on one rank."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return wrapped(*args, **kwargs)
    return logps_and_entropy(wrapped, instance, args, kwargs)


def logps_and_entropy(
    wrapped: Callable[..., _Both], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Both:
    """Wrap ``compute_logps_and_entropy_from_logits``: both in one pass over the logits, which are not changed.

    ``args``, whose last is not used, because blocks are sized by bytes, which does not change results:

    - logits: ``[B, S, V / TP]`` or, packed, ``[1, T, V / TP]``.
    - labels: ``[B, S]`` or ``[1, T]``, already shifted; -100 where there is nothing to predict.
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
    # A product, as in ms-swift: NaN stays NaN.
    return log_probs * ~ignored, None if entropy is None else entropy.to(logits.dtype)
