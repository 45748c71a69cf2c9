"""The entropy of each token's distribution under vocabulary-parallel logits."""

from __future__ import annotations

from typing import Any

import torch

from . import shared
from .softmax import VocabParallelLogprobEntropy


@torch.compiler.disable
def token_entropy(
    logits: torch.Tensor, group: Any = None, *, chunk_size: int | None = None, inference_only: bool = False
) -> torch.Tensor:
    """Entropy of each token's distribution, in nats, with a gradient for the logits; does not modify the logits.

    If ``token_logprobs(..., with_entropy=True)`` has just run on these logits, or on logits of which these are a
    window, the entropies are already available, and one pass computes both gradients: no collective, no second read of
    the logits, no memory. Otherwise the cost is that of `logprob.token_logprobs`.

    Args:
        logits: ``[..., V / TP]``, any floating dtype, any strides; this rank's part of the vocabulary. Logits of
            ``-inf`` count as probability 0.
        group: the tensor-parallel process group; None is the default group, or one process if there is none.
        chunk_size: upstream's tokens per chunk. Validated, but not used: blocks are sized by bytes, which does not
            affect the result.
        inference_only: compute no gradient and save nothing.

    Returns:
        float32 ``[...]``.

    Raises:
        ValueError: the logits are not a floating-point matrix, or ``chunk_size`` is negative.
    """
    shared.check_logits(logits)
    if chunk_size is not None and chunk_size < 0:
        raise ValueError(f"chunk_size is {chunk_size}: expected a number of tokens, 0 or more, or None")
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        known = shared.recall(logits, group)
        if known is not None:
            return known
        _, entropy = VocabParallelLogprobEntropy.apply(logits, None, shared.reduction_group(group), True)
        return entropy
