"""The log-probability of each target token under vocabulary-parallel logits."""

from __future__ import annotations

from typing import Any

import torch

from . import shared
from .softmax import VocabParallelLogprobEntropy


@torch.compiler.disable
def token_logprobs(
    logits: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Any = None,
    *,
    chunk_size: int | None = None,
    inference_only: bool = False,
    with_entropy: bool = False,
    of_cross_entropy: bool = False,
) -> torch.Tensor:
    """Log-probability of each target token, with a gradient for the logits.

    Forward needs two all-reduces, or none if the group has one rank; backward needs none. In addition to the result,
    they need memory for one block of tokens (`softmax.WORK_BYTES` or `WORK_BYTES_ON_GPU`). Backward writes the gradient
    over the logits if `ownership` can prove that nothing else reads them, else into one tensor of the logits' dtype.

    Args:
        logits: ``[..., V / TP]``, any floating dtype, any strides; this rank's part of the vocabulary.
        target: integers ``[...]``, indices in the whole vocabulary. For an index that no rank has, the log-probability
            is 0 and its gradient is minus the probabilities, as in SkyRL and NeMo-RL; see ``of_cross_entropy``.
        vocab_start_index: the first index of this rank's part.
        vocab_end_index: one past its last index.
        group: the tensor-parallel process group; None is the default group, or one process if there is none.
        chunk_size: upstream's tokens per chunk. Validated, but not used: blocks are sized by bytes, which does not
            affect the result.
        inference_only: compute no gradient and save nothing.
        with_entropy: also compute the entropies, for a later call of `entropy.token_entropy` with the same logits.
        of_cross_entropy: treat targets that no rank has like `minus_cross_entropy`.

    Returns:
        float32 ``[...]``.

    Raises:
        ValueError: shapes, dtypes or indices do not fit together; the message names them.
    """
    local = local_target(logits, target, vocab_start_index, vocab_end_index, chunk_size)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
        graph = torch.is_grad_enabled() and logits.requires_grad
        both = with_entropy and graph and shared.has_one_backward(logits)
        log_probs, entropy = VocabParallelLogprobEntropy.apply(
            logits, local, shared.reduction_group(group), both, of_cross_entropy
        )
        if entropy is not None:
            log_probs = shared.remember(logits, group, log_probs, entropy)
    return log_probs


@torch.compiler.disable
def minus_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, group: Any = None, *, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The negated result of Megatron's ``vocab_parallel_cross_entropy``, and entropies: one pass, one backward.

    Like `token_logprobs`, if every rank has the same number of columns. For a target that no rank has, the result is
    minus the logarithm of the sum of ``exp(x - m)``, with m the token's largest logit.

    Args:
        logits: ``[..., V / TP]``, as for `token_logprobs`; not modified in forward.
        target: integers ``[...]``, indices in the whole vocabulary.
        group: the tensor-parallel process group; None is the default group, or one process if there is none.
        with_entropy: return entropies, too. Both quantities then share one backward.

    Returns:
        Log-probabilities, and entropies in nats or None, each float32 ``[...]``.

    Raises:
        ValueError: as `token_logprobs`.
    """
    group = shared.reduction_group(group)
    start = 0 if group is None else torch.distributed.get_rank(group) * logits.shape[-1]
    local = local_target(logits, target, start, start + logits.shape[-1], None)
    log_probs, entropy = VocabParallelLogprobEntropy.apply(logits, local, group, with_entropy, True)
    return log_probs, entropy


def local_target(
    logits: torch.Tensor, target: torch.Tensor, start: int, end: int, chunk_size: int | None
) -> torch.Tensor:
    """The targets in the form that `softmax.VocabParallelLogprobEntropy` takes.

    The form is int64: indices in this rank's part ``[start, end)``, or -1.

    Raises:
        ValueError: as `token_logprobs`.
    """
    shared.check_logits(logits)
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target has shape {list(target.shape)} and the logits have {list(logits.shape)}: expected one target for "
            f"each token, {list(logits.shape[:-1])}"
        )
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype is torch.bool:
        raise ValueError(f"target has dtype {target.dtype}: expected integers, the tokens' indices in the vocabulary")
    if target.device != logits.device:
        raise ValueError(f"target is on {target.device} and the logits are on {logits.device}: move one to the other")
    if not 0 < end - start <= logits.shape[-1]:
        raise ValueError(
            f"vocab_start_index {start} and vocab_end_index {end} span {end - start} tokens, and the logits have "
            f"{logits.shape[-1]} columns ({list(logits.shape)}): expected this rank's part of the vocabulary"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: expected a number of tokens, 1 or more, or None")
    elsewhere = (target < start) | (target >= end)
    return (target - start).masked_fill_(elsewhere, -1).long()
