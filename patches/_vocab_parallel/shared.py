"""Shared code of the log-probability and the entropy of the same logits: checks, the group, and one pass for both.

SkyRL computes log-probabilities first, and entropies of the same logits, or of a window of them, later. As two autograd
functions, each would save the logits, so the first one to run backward would see the other as a holder of the logits,
and would need a separate gradient. Hence one function computes both. Between the two calls only weak references are
kept: nothing lives longer than the log-probabilities' own graph.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch


def check_logits(logits: torch.Tensor) -> None:
    """Raise ValueError, with the shape, unless these can be logits of a part of the vocabulary."""
    if not logits.dim() or not logits.shape[-1] or not logits.dtype.is_floating_point:
        raise ValueError(
            f"logits have shape {list(logits.shape)} and dtype {logits.dtype}: expected floating-point numbers "
            "[..., V / TP], such as [B, S, V / TP] or [T, V / TP], with at least one column"
        )


def can_take(logits: torch.Tensor, target: torch.Tensor | None = None) -> bool:
    """Whether our functions can compute these logits; upstream's functions accept more than ours do.

    False within a region that torch.compile traces: our functions would break its graph, or fail ``fullgraph=True``.
    """
    if torch.compiler.is_compiling() or not logits.is_floating_point():
        return False
    return logits.dim() > 0 and (target is None or target.shape == logits.shape[:-1])


def reduction_group(group: Any) -> Any:
    """The group to reduce over, or None if there is no other rank: a sum over one rank wastes a kernel launch."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    size = torch.distributed.get_world_size(group)
    if size < 1:
        raise ValueError(f"this process (rank {torch.distributed.get_rank()}) is not in the process group {group}")
    return None if size == 1 else (group or torch.distributed.group.WORLD)


# ------------------------------------------------------------------------------------- one pass for both


@dataclass(frozen=True)
class _Known:
    """Entropies, and the state of their logits when they were computed."""

    entropy: weakref.ref[torch.Tensor]
    owner: weakref.ref[torch.Tensor]
    group: Any
    version: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


_latest = threading.local()


class _Keep(torch.autograd.Function):
    """A copy of the log-probabilities whose graph keeps the entropies alive."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        ctx.entropy = entropy
        return log_probs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def has_one_backward(logits: torch.Tensor) -> bool:
    """Whether both quantities of these logits may share one function.

    False for a leaf: each quantity can run its own backward, one after the other, since there is no graph below that
    the first backward would free.
    """
    return not logits.is_inference() and not _owner(logits).is_leaf and _leads_to_owner(logits)


def remember(logits: torch.Tensor, group: Any, log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities, and let `recall` return the entropies while their graph lives."""
    _latest.known = _Known(
        weakref.ref(entropy),
        weakref.ref(_owner(logits)),
        group,
        logits._version,
        logits.storage_offset(),
        logits.shape,
        logits.stride(),
    )
    kept: torch.Tensor = _Keep.apply(log_probs, entropy)
    return kept


def recall(logits: torch.Tensor, group: Any) -> torch.Tensor | None:
    """A copy of the entropies of these logits, if they are known; without a gradient if the logits get none."""
    known: _Known | None = getattr(_latest, "known", None)
    if known is None or logits.is_inference() or known.group is not group:
        return None
    entropy = known.entropy()
    if entropy is None or known.owner() is not _owner(logits) or known.version != logits._version:
        return None
    window = _window(known, logits)
    if window is None:
        return None
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return entropy.detach()[window].clone()
    # The gradient bypasses these logits and goes to the tensor that they view.
    seen = logits._backward_hooks or logits.retains_grad
    # known: after a backward the function's saved tensors are freed, which its own flag shows
    spent = getattr(entropy.grad_fn, "spent", False)
    return entropy[window].clone() if _leads_to_owner(logits) and not seen and not spent else None


def _owner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


# known: the gradient's node must be the owner's own node
def _leads_to_owner(tensor: torch.Tensor) -> bool:
    """Whether the gradient of a view reaches the tensor that it views: not if the view was made under no_grad."""
    owner = _owner(tensor)
    if tensor is owner:
        return True
    target, node = owner.grad_fn, tensor.grad_fn
    for _ in range(32):  # views of views; no code makes more
        if node is None or target is None or node is target:
            break
        parents = node.next_functions
        node = parents[0][0] if len(parents) == 1 else None
    return target is not None and node is target


def _window(known: _Known, part: torch.Tensor) -> tuple[slice, ...] | None:
    """The window of the known tokens that these are, by memory position; None if they are not a rectangle."""
    if part.dim() != len(known.shape) or part.shape[-1] != known.shape[-1] or part.stride(-1) != known.stride[-1]:
        return None
    window = [slice(None)] * (part.dim() - 1)
    offset = part.storage_offset() - known.offset
    for dim in sorted(range(part.dim() - 1), key=lambda dim: known.stride[dim], reverse=True):
        if part.shape[dim] > 1 and part.stride(dim) != known.stride[dim]:
            return None
        if known.shape[dim] > 1:
            start, offset = divmod(offset, known.stride[dim]) if known.stride[dim] else (0, offset)
            if start < 0 or start + part.shape[dim] > known.shape[dim]:
                return None
            window[dim] = slice(start, start + part.shape[dim])
        elif part.shape[dim] > 1:
            return None
    return tuple(window) if offset == 0 else None
