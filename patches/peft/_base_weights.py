"""Base weights under LoRA that are the same after a merge and an unmerge: a copy is kept while an adapter is merged.

The copy is restored if this certainly undoes the merge and nothing else: the current weight is, bit for bit, the kept
one with the same adapters merged into it again, as PEFT does it. This detects any change in between (the weight, the
adapter, its scaling, the set of merged adapters), and then PEFT's own way, subtraction, is taken.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

import rlhf_patches

_NAME = "peft-lora-merge-drift"
_ROUNDED = (torch.bfloat16, torch.float16)
"""In float32 a cycle changes a weight by a relative 1e-7 at most, and the copies would be twice as large."""
_EXACT_ENOUGH = (torch.float32, torch.float64)

_counted = {"unmerged exactly": 0, "unmerged by PEFT": 0}


def observed() -> dict[str, Any]:
    """The number of layers that this process has unmerged, by either way."""
    return dict(_counted)


@dataclass
class _Kept:
    """The weight before the first merge, in host memory, and the merges since: (adapter, safe_merge), in order."""

    weight: torch.Tensor
    merges: list[tuple[str, bool]] = field(default_factory=list)


# Not stored on the layers, which are copied and pickled.
_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


def merging(wrapped: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """Around ``Linear.merge``."""
    if _is_unloaded_next() or not _can_be_kept(layer):
        _kept.pop(layer, None)
        return wrapped(*args, **kwargs)
    safe_merge, names = args
    already = len(layer.merged_adapters)
    kept = _kept.pop(layer, None)
    adapters = [name for name in names or layer.active_adapters if name in layer.lora_A]
    if not adapters or (already and kept is None) or not all(_is_a_sum(layer, name) for name in adapters):
        if not adapters and kept is not None:
            _kept[layer] = kept  # this call merges nothing
        return wrapped(*args, **kwargs)
    if not already:
        kept = _copied(layer.get_base_layer().weight)
    try:
        return wrapped(*args, **kwargs)
    finally:
        if kept is not None and layer.merged_adapters:
            kept.merges += [(name, bool(safe_merge)) for name in layer.merged_adapters[already:]]
            _kept[layer] = kept


# writes: the same as the release's `unmerge`, but exactly
def unmerging(wrapped: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
    """Around ``Linear.unmerge``."""
    kept = _kept.pop(layer, None)
    if kept is not None and _undone(layer, kept):
        layer.merged_adapters.clear()
        _counted["unmerged exactly"] += 1
        rlhf_patches.decided(_NAME, True)
        return None
    if layer.merged_adapters:
        _counted["unmerged by PEFT"] += 1
    if not layer.merged_adapters or getattr(layer.get_base_layer().weight, "dtype", None) in _EXACT_ENOUGH:
        rlhf_patches.decided(_NAME, False)
    return wrapped(*args, **kwargs)


# known: PEFT's own function, by its name; an unneeded copy costs memory, and without a copy PEFT unmerges
def _is_unloaded_next() -> bool:
    """Whether this is within PEFT's ``merge_and_unload``, which discards the layers: they cannot be unmerged."""
    frame: FrameType | None = sys._getframe(2)  # the caller of the layer's merge, or of an override
    for _ in range(4):
        if frame is None:
            return False
        if frame.f_code.co_name == "_unload_and_optionally_merge":
            return True
        frame = frame.f_back
    return False


def _copied(weight: torch.Tensor) -> _Kept | None:
    """The copy; None if the host has no memory for it."""
    try:
        return _Kept(weight.data.to("cpu", copy=True))
    except (MemoryError, RuntimeError):
        return None


def _undone(layer: Any, kept: _Kept) -> bool:
    """Whether the layer has its kept weight again: not if the device has no memory, or the undo is not certain."""
    if layer.merged_adapters != [name for name, _ in kept.merges] or not _can_be_kept(layer):
        return False
    weight = layer.get_base_layer().weight
    if (weight.shape, weight.dtype) != (kept.weight.shape, kept.weight.dtype):
        return False
    try:
        base = kept.weight.to(weight.device)
        with torch.no_grad():
            merged = _merged(layer, base.clone(), kept.merges)
        if merged is None or not torch.equal(merged, weight.data):
            return False
    except RuntimeError:
        return False
    weight.data.copy_(base)  # writes: the weight before the merge
    return True


def _is_a_sum(layer: Any, adapter: str) -> bool:
    """Whether merging only adds a product to the weight: no DoRA or other variant, no bias."""
    variants = getattr(layer, "lora_variant", None)  # 0.16 and later; before, DoRA was the only one
    variant = adapter in variants if variants is not None else getattr(layer, "use_dora", {}).get(adapter, False)
    return not variant and not getattr(layer, "lora_bias", {}).get(adapter, False)


def _can_be_kept(layer: Any) -> bool:
    """Whether it has a whole weight of ordinary floating-point numbers in this process.

    Not a shard (a DTensor), and not one of several quantized kinds. ZeRO-3 needs no copy: it drops what was merged
    into a gathered weight.
    """
    weight = getattr(layer.get_base_layer(), "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.dtype in _ROUNDED
        and type(weight.data) is torch.Tensor
        and weight.device.type != "meta"
        and not hasattr(weight, "ds_id")
    )


def _merged(layer: Any, weight: torch.Tensor, merges: list[tuple[str, bool]]) -> torch.Tensor | None:
    """The weight with the adapters merged into it, in place; None if an adapter no longer exists."""
    for adapter, safe_merge in merges:
        if adapter not in layer.lora_A:
            return None
        delta = layer.get_delta_weight(adapter)
        # A safe merge rounds the product first (0.16 and later).
        weight += delta.to(weight.dtype) if safe_merge and hasattr(layer, "lora_variant") else delta
    return weight
