"""Replacements of SkyRL's functions beyond `vocab_parallel.upstream`: both quantities of the same logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state

from rlhf_patches import in_force, matched

from .._vocab_parallel import upstream
from .._vocab_parallel.entropy import token_entropy
from .._vocab_parallel.logprob import token_logprobs
from . import logprob_backward

ENTROPY = "skyrl-entropy-backward"
LOGPROB = logprob_backward.PATCH.name


def has_joint_backward() -> bool:
    """Whether log-probabilities and entropies of the same logits share one backward: both patches are in force."""
    return in_force(ENTROPY) and in_force(LOGPROB)


# ------------------------------------------------------------------------------------- log-probabilities


def along_with_entropy(function: Any) -> Callable[..., torch.Tensor]:
    """Replaces ``function.apply`` where SkyRL calls one of its two functions for log-probabilities.

    If our function will compute the entropies of the same logits too, the same pass computes them.
    """
    upstreams: Callable[..., torch.Tensor] = function.apply
    if not in_force(ENTROPY):
        return upstreams

    def apply(logits: torch.Tensor, target: torch.Tensor, start: int, end: int, *arguments: Any) -> torch.Tensor:
        *chunk_size, group, inference_only = arguments
        if inference_only or not upstream.can_take(logits, target, start, end):
            return upstreams(logits, target, start, end, *arguments)
        size = chunk_size[0] if chunk_size else None
        return token_logprobs(logits, target, start, end, group, chunk_size=size, with_entropy=True)

    return apply


def around_forward(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ``DistributedLogprob.forward``: our function saves the logits, upstream's saves a softmax.

    The entropy of SkyRL 0.1.0 and 0.2.0 writes into the logits in backward. Where `skyrl-entropy-backward` is disabled,
    upstream's function has to run. The entropy's own fingerprint is unknown then; the fingerprint of the chunked
    backward did not change until after the entropy was repaired (no commit of SkyRL has one without the other).
    """
    if torch.compiler.is_compiling():  # the checks below would break its graph
        return wrapped(*args, **kwargs)
    writes_into_logits = matched(LOGPROB, logprob_backward.CHUNKED_BACKWARD) == logprob_backward.OF_0_1_AND_0_2
    if writes_into_logits and not in_force(ENTROPY):
        return wrapped(*args, **kwargs)
    return upstream.around_forward(wrapped, instance, args, kwargs)


# ------------------------------------------------------------------------------------- entropies


def around_entropy(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ``vocab_parallel_entropy``: all logits in one call, which needs no more memory than one upstream chunk."""
    group = _group()
    if group is None:
        return wrapped(*args, **kwargs)
    logits, *chunks = args
    _chunk_size(wrapped, logits, *chunks)
    return token_entropy(logits, group).to(logits.dtype)


def around_weighted_entropy(wrapped: Any, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps ``vocab_parallel_entropy_weighted_sum`` of SkyRL 0.4.0.

    Upstream skips chunks whose weights are all zero, so their logits, even NaN, do not affect the result.
    """
    group = _group()
    logits, weights, *chunks = args
    if group is None or weights.shape != logits.shape[-2:-1]:
        return wrapped(*args, **kwargs)
    size = _chunk_size(wrapped, logits, *chunks)
    entropy = token_entropy(logits, group).to(logits.dtype)
    if size is not None:
        weighted = torch.nn.functional.pad(weights != 0, (0, -len(weights) % size)).view(-1, size).any(1)
        entropy = entropy.masked_fill(~weighted.repeat_interleave(size)[: len(weights)], 0.0)
    return (entropy * weights).sum()


def _group() -> Any:
    """The tensor-parallel group. Where Megatron has none, upstream's own function runs."""
    return parallel_state.get_tensor_model_parallel_group(check_initialized=False)


def _chunk_size(wrapped: Any, logits: torch.Tensor, *chunks: Any) -> int | None:
    """The number of tokens that upstream takes at once, None for all; raises 0.4.0's error for invalid arguments."""
    size: int | None = wrapped.__globals__["_resolve_vocab_entropy_chunk_size"](logits, *chunks) if chunks else None
    return size
