"""Whether backward may overwrite a saved tensor: only if nothing else can read the tensor again.

backward takes the tensor out of ``ctx`` and makes autograd release its own reference at once, which autograd does only
if the graph is not retained. From then on a sole owner's only reference is backward's local variable: every other
holder, in Python or C++, of the tensor, of a tensor sharing its storage, or of the storage, makes a count higher. The
counts are private to a torch build, so this module measures the lowest counts once per process on probes that take the
same path, and checks that every known way of holding a tensor raises them. Any other counts mean "not in place".
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("rlhf_patches")

TIMEOUT = 60.0
"""Seconds for the measurement, which takes milliseconds. Without a measurement, backward is out of place."""

# Reasons, as they appear in reports.
LEAF = "the logits are a leaf"
SUBCLASS = "the logits are a tensor subclass"
OVERLAP = "the logits' elements share memory"
FOREIGN = "the logits' memory is shared with NumPy or another process, or was not allocated by torch"
KEPT = "the graph is kept for another backward"
LOGITS_HELD = "something else holds the logits"
SHARED = "another tensor shares the logits' memory"
STORAGE_HELD = "something else holds the logits' storage"
UNPROVEN = "this torch build's reference counts could not be calibrated"


def refusal_in_forward(logits: torch.Tensor) -> str | None:
    """Why this tensor can never be overwritten, or None. To be called in forward, before the tensor is saved.

    Tensors that saved-tensor hooks (checkpointing, offloading) pass to backward are no longer leaves or views.
    """
    base = logits if logits._base is None else logits._base
    if type(logits) is not torch.Tensor or type(base) is not torch.Tensor:
        return SUBCLASS
    if logits.is_leaf or base.is_leaf:
        return LEAF
    if _overlaps(logits):
        return OVERLAP
    return None


def unpack(ctx: Any) -> tuple[torch.Tensor, list[torch.Tensor], str | None]:
    """The saved tensors of ``ctx``, and why the first one must not be overwritten (None: it may be).

    To be called in backward. ``ctx.refusal`` must hold the result of `refusal_in_forward`. The caller must hold only
    one reference to the first tensor, and may overwrite it if there is no reason.

    Returns:
        The first saved tensor, the others, and the reason.
    """
    lowest = _lowest_counts()
    if lowest is None:
        tensor, *others = ctx.saved_tensors
        return tensor, others, ctx.refusal or UNPROVEN
    tensor, others, found = _release(ctx)
    if ctx.refusal is not None:
        return tensor, others, ctx.refusal
    if torch._C._autograd._get_current_graph_task_keep_graph():  # True outside a backward pass, too
        return tensor, others, KEPT
    return tensor, others, _difference(found, lowest[tensor._base is not None])


def _release(ctx: Any) -> tuple[torch.Tensor, list[torch.Tensor], tuple[int, ...]]:
    """Take the saved tensors out of the graph and count the remaining holders, for real calls and for probes."""
    tensor, *others = ctx.saved_tensors
    ctx.maybe_clear_saved_tensors()  # does nothing if the graph is retained
    return tensor, others, _counts(tensor)


def _counts(tensor: torch.Tensor) -> tuple[int, ...]:
    """Every count that another holder raises: the storage's, the tensor's, and those of the tensor it views."""
    storage = tensor.untyped_storage()
    # NumPy's holders, and other readers of memory that torch has not allocated, raise no count.
    # A storage stops being resizable when NumPy shares it; on a GPU, is_shared() is always true.
    private = storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared())
    found = [
        int(private),
        # A user's reference to the storage object raises that object's own count only.
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
        # On torch 2.13 a C++ holder of the tensor raises both.
        sys.getrefcount(tensor),
        tensor._use_count(),
    ]
    base = tensor._base
    if base is not None:
        found += [sys.getrefcount(base), base._use_count()]
    return tuple(found)


def _difference(found: tuple[int, ...], lowest: tuple[int, ...]) -> str | None:
    """The meaning of the first count that differs; None if none does."""
    if found == lowest:
        return None
    if found[0] != lowest[0]:
        return FOREIGN
    if found[1] != lowest[1]:
        return STORAGE_HELD
    return LOGITS_HELD if found[3:] != lowest[3:] else SHARED


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share an address, as in an expanded tensor (never False if they do)."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < end:
                return True
            end = stride * (size - 1) + end
    return False


# ------------------------------------------------------------------------------------- calibration


class _Probe(torch.autograd.Function):
    """Saves its input, and records the counts of `_release`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, found: list[tuple[int, ...]]) -> torch.Tensor:
        ctx.found = found
        ctx.save_for_backward(tensor)
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        tensor, _, found = _release(ctx)
        ctx.found.append(found)
        return torch.zeros_like(tensor), None


# Ways to hold a tensor. Each has to raise a count.
_HOLDERS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda tensor: tensor,
    lambda tensor: tensor if tensor._base is None else tensor._base,
    lambda tensor: tensor[..., :1],
    lambda tensor: tensor.detach(),
    lambda tensor: tensor.data,
    lambda tensor: tensor.untyped_storage(),
    lambda tensor: tensor.detach().numpy(),
    lambda tensor: torch.utils.dlpack.to_dlpack(tensor.detach()),
    lambda tensor: tensor.square(),  # a node that has saved the tensor
    lambda tensor: tensor[..., :1].square(),  # or a view of it
    lambda tensor: tensor.square() if tensor._base is None else tensor._base.square(),
)


def _probe(
    view: bool, hold: Callable[[torch.Tensor], Any] = lambda tensor: None, keep_graph: bool = False
) -> tuple[int, ...]:
    leaf = torch.ones(1, 3, 4, device="cpu", requires_grad=True)
    tensor = leaf * 2
    if view:
        tensor = tensor.squeeze(0).unsqueeze(0)
    found: list[tuple[int, ...]] = []
    result = _Probe.apply(tensor, found)
    held = hold(tensor)
    del tensor
    result.backward(retain_graph=keep_graph)
    del held
    return found[0]


def _calibrate() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    lowest = (_probe(view=False), _probe(view=True))
    for view, expected in enumerate(lowest):
        again = [_probe(bool(view)) for _ in range(3)]
        held = [_probe(bool(view), hold) for hold in _HOLDERS] + [_probe(bool(view), keep_graph=True)]
        # Holders can only add to the counts of a sole owner; so an unknown kind of holder cannot look like a sole owner
        # either, as long as it raises any count.
        higher = all(found[0] < expected[0] or _exceeds(found, expected) for found in held)
        if any(found != expected for found in again) or not higher:
            return None
    return lowest


def _exceeds(found: tuple[int, ...], lowest: tuple[int, ...]) -> bool:
    return found != lowest and all(a >= b for a, b in zip(found[1:], lowest[1:], strict=True))


@functools.cache
def _lowest_counts() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A sole owner's counts, for a tensor and for a view, or None if they prove nothing on this torch build."""
    found: list[Any] = []

    def calibrate() -> None:
        try:
            found.append(_calibrate() if getattr(sys, "_is_gil_enabled", lambda: True)() else None)
        except Exception:  # private functions that are missing or different
            logger.debug("reference counts could not be calibrated", exc_info=True)
            found.append(None)

    # In a separate thread, where the caller's modes and saved-tensor hooks are not active.
    thread = threading.Thread(target=calibrate, daemon=True)
    try:
        thread.start()
        thread.join(TIMEOUT)
    except RuntimeError:  # no more threads, or the interpreter is shutting down
        logger.debug("reference counts could not be calibrated", exc_info=True)
    lowest: tuple[tuple[int, ...], tuple[int, ...]] | None = found[0] if found else None
    return lowest
