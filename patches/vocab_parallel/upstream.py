"""``forward`` and ``backward`` of the autograd functions that SkyRL and NeMo-RL share.

They are computed by `softmax.VocabParallelLogprobEntropy`, in place of the methods, so that
``DistributedLogprob.apply`` stays what it is to its callers.
"""

from __future__ import annotations

from typing import Any

import torch

from . import logprob, shared
from .softmax import VocabParallelLogprobEntropy


@torch.compiler.disable
def distributed_forward(
    ctx: Any,
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Any,
    inference_only: bool = False,
) -> torch.Tensor:
    """``DistributedLogprob.forward``."""
    return chunked_forward(
        ctx, vocab_parallel_logits, target, vocab_start_index, vocab_end_index, None, group, inference_only
    )


@torch.compiler.disable
def chunked_forward(
    ctx: Any,
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None,
    tp_group: Any,
    inference_only: bool = False,
) -> torch.Tensor:
    """``ChunkedDistributedLogprob.forward``."""
    local = logprob.local_target(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size)
    log_probs, _ = VocabParallelLogprobEntropy.forward(
        _Unsaved() if inference_only else ctx, vocab_parallel_logits, local, shared.reduction_group(tp_group), False
    )
    assert log_probs is not None
    return log_probs


@torch.compiler.disable
def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """``backward`` of both: a gradient for the logits, and none for the six other arguments."""
    gradient, *_ = VocabParallelLogprobEntropy.backward(ctx, grad_outputs[0], None)
    return gradient, *(None,) * 6


def is_ours(ctx: Any) -> bool:
    """Whether a forward of this module has saved what is in this context."""
    return getattr(ctx, "saved_by", None) is VocabParallelLogprobEntropy


def entropy_forward(ctx: Any, vocab_parallel_logits: torch.Tensor, group: Any) -> torch.Tensor:
    """``_VocabParallelEntropy.forward``, whose result has the dtype of the logits."""
    shared.check_logits(vocab_parallel_logits)
    _, entropy = VocabParallelLogprobEntropy.forward(
        ctx, vocab_parallel_logits, None, shared.reduction_group(group), True
    )
    assert entropy is not None
    return entropy.to(vocab_parallel_logits.dtype)


@torch.compiler.disable
def entropy_backward(ctx: Any, grad_output: torch.Tensor | None) -> torch.Tensor | None:
    """``_VocabParallelEntropy.backward``."""
    gradient, *_ = VocabParallelLogprobEntropy.backward(ctx, None, grad_output)
    result: torch.Tensor | None = gradient
    return result


class _Unsaved:
    """In place of ``ctx`` where there will be no backward."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
