"""``forward`` and ``backward`` of the autograd functions that SkyRL and NeMo-RL share.

`softmax.VocabParallelLogprobEntropy` computes them instead of the methods, so that ``DistributedLogprob.apply`` stays
the same to its callers.
"""

from __future__ import annotations

from typing import Any

import torch

from . import logprob, shared
from .softmax import VocabParallelLogprobEntropy


def around_forward(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wraps ``DistributedLogprob.forward``."""
    ctx, logits, target, start, end, group, inference_only = args
    if not can_take(logits, target, start, end):
        return _upstreams(wrapped, args, kwargs)
    return _forward(ctx, logits, target, start, end, None, group, inference_only)


def around_chunked_forward(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Wraps ``ChunkedDistributedLogprob.forward``."""
    _, logits, target, start, end, *_ = args
    return _forward(*args) if can_take(logits, target, start, end) else _upstreams(wrapped, args, kwargs)


def around_backward(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ``backward`` of both: runs the backward that belongs to the forward, whichever patches are in force now."""
    ctx, *_ = args
    return backward(*args) if is_ours(ctx) else wrapped(*args, **kwargs)


def around_entropy_backward(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ``_VocabParallelEntropy.backward`` in the same way."""
    ctx, *_ = args
    return entropy_backward(*args) if is_ours(ctx) else wrapped(*args, **kwargs)


def can_take(logits: torch.Tensor, target: torch.Tensor, start: int, end: int) -> bool:
    """Whether our function can compute these; upstream's accepts targets of fewer tokens, and wider ranges."""
    return shared.can_take(logits, target) and bool(0 < end - start <= logits.shape[-1])


def _upstreams(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    log_probs: torch.Tensor = wrapped(*args, **kwargs)
    return log_probs


@torch.compiler.disable
def _forward(
    ctx: Any,
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None,
    tp_group: Any,
    inference_only: bool = False,
) -> torch.Tensor:
    local = logprob.local_target(vocab_parallel_logits, target, vocab_start_index, vocab_end_index, chunk_size)
    log_probs, _ = VocabParallelLogprobEntropy.forward(
        _Unsaved() if inference_only else ctx, vocab_parallel_logits, local, shared.reduction_group(tp_group), False
    )
    assert log_probs is not None
    return log_probs


@torch.compiler.disable
def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """``backward`` of both: a gradient for the logits, and None for the six other arguments."""
    gradient, *_ = VocabParallelLogprobEntropy.backward(ctx, grad_outputs[0], None)
    return gradient, *(None,) * 6


def is_ours(ctx: Any) -> bool:
    """Whether a forward of this module has saved this context."""
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
    """Replaces ``ctx`` where there will be no backward."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...
