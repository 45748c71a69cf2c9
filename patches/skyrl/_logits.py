"""Keeps the logits of SkyRL's Megatron loss functions in the model's dtype, and processes them in chunks."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module

from rlhf_patches import in_force

from .._vocab_parallel import counters
from .._vocab_parallel.entropy import token_entropy
from . import _calls

CHUNK_BYTES = 128 << 20
"""Memory for the float32 logits of one chunk. SkyRL's functions hold about four tensors of that size at once: 512 MiB,
the limit of SkyRL 0.4.0 for the entropies of a chunk."""

_done: Counter[str] = Counter()


def in_its_dtype(model: Any, temperature: float, config: Any = None) -> Callable[..., Any]:
    """The model's callable; with ``fp32_output=False`` where fp32 logits would not change the result.

    Args:
        model: a chunk of the model in its wrappers.
        temperature: SkyRL divides the logits by it in place: in bfloat16 the division would round them.
        config: the algorithm's, if a loss is computed. With ``use_entropy_loss``, log-probabilities and entropies have
            separate gradients. In bfloat16 both are rounded, and then their sum, unless one function computes both.
    """
    reason = _refusal(model)
    if reason is None and temperature != 1.0:
        reason = "the temperature is not 1"
    elif reason is None and getattr(config, "use_entropy_loss", False) and not _calls.has_joint_backward():
        reason = "the entropy is part of the loss, with a separate gradient"
    with counters.locked():
        _done["logits in the model's dtype" if reason is None else f"logits in fp32 because {reason}"] += 1
    return model if reason else functools.partial(model, fp32_output=False)


def _refusal(model: Any) -> str | None:
    """Why the argument would not reach the Float16Module, or None."""
    while not isinstance(model, Float16Module):
        if not hasattr(model, "module"):
            return "the model is not in bfloat16"
        if not _accepts_keywords(model):
            return f"{type(model).__name__} does not pass on keyword arguments"
        model = model.module
    if not model.config.bf16:
        return "the model is not in bfloat16"
    # known: Megatron's own class, which accepts it by this name
    if "fp32_output" not in inspect.signature(model.forward).parameters:
        return f"this release's {type(model).__name__} has no fp32_output"
    return None


# known: a model without keywords cannot be called with one; a model with keywords is checked by its result
def _accepts_keywords(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def tokens_per_chunk(config: Any, logits: torch.Tensor) -> int | None:
    """The number of positions of each row that SkyRL casts to fp32 at once.

    Args:
        config: the trainer's. If it has an attribute ``logprobs_chunk_size`` (a field from SkyRL 0.3.0 on), this
            attribute is the number, and None means all positions at once.
        logits: ``[B, S, V / TP]``.

    Returns:
        ``logprobs_chunk_size``; if there is no such attribute, as many as fit into `CHUNK_BYTES`, at least 1.

    Raises:
        ValueError: ``logprobs_chunk_size`` is not a positive integer or None.
    """
    try:
        size: int | None = config.logprobs_chunk_size
    except AttributeError:
        rows, _, columns = logits.shape
        return max(1, CHUNK_BYTES // max(1, int(4 * rows * columns)))
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            f"logprobs_chunk_size is {size!r}: expected a number of tokens, 1 or more, or None (no chunks)"
        )
    return size


def in_chunks(function: Callable[..., torch.Tensor], config: Any) -> Callable[..., torch.Tensor]:
    """``from_parallel_logits_to_logprobs`` with a chunk size for logits in bfloat16, as released for other dtypes."""

    def logprobs(logits: torch.Tensor, *args: Any, chunk_size: None, **kwargs: Any) -> torch.Tensor:
        if logits.dtype == torch.bfloat16:
            return function(logits, *args, chunk_size=tokens_per_chunk(config, logits), **kwargs)
        return function(logits, *args, chunk_size=chunk_size, **kwargs)

    return logprobs


def entropy(function: Callable[..., torch.Tensor], logits: torch.Tensor, config: Any) -> torch.Tensor:
    """``vocab_parallel_entropy`` in fp32, whatever the dtype of the logits ``[B, S, V / TP]``.

    SkyRL's own computes in the dtype of the logits, and the function of `skyrl-entropy-backward` returns that dtype.
    """
    if logits.dtype != torch.bfloat16:
        return function(logits)
    if in_force(_calls.ENTROPY):
        return token_entropy(logits, parallel_state.get_tensor_model_parallel_group())
    chunks = logits.split(tokens_per_chunk(config, logits) or max(1, logits.shape[1]), dim=1)
    return torch.cat([function(chunk.float()) for chunk in chunks], dim=1)


def observed() -> dict[str, int]:
    """How many micro-batches had logits in the model's dtype so far, and how many did not, with the reason."""
    with counters.locked():
        return dict(_done)
