"""The base weight of a layer with merged adapters, for the norm that DoRA divides by."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import variants

import rlhf_patches

_NAME = "peft-dora-second-merge"
_LINEAR, _EMBEDDING = variants.DoraLinearVariant, variants.DoraEmbeddingVariant
_CONVOLUTIONS = (variants.DoraConv1dVariant, variants.DoraConv2dVariant, variants.DoraConv3dVariant)
_DORA = (_LINEAR, _EMBEDDING, *_CONVOLUTIONS)


def base_of(module: Any, adapter: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight without the adapters that are merged into it; the weight itself if there are none."""
    merged = list(module.merged_adapters)
    if not merged:
        rlhf_patches.decided(_NAME, False)
        return weight
    if not _is_known(module, adapter, merged):
        return weight
    base = weight.detach()
    for name in reversed(merged):
        factor = _factor(module, name)
        base = (base if factor is None else base / factor) - module.get_delta_weight(name)
    rlhf_patches.decided(_NAME, True)
    # A magnitude of 0 leaves nothing to divide.
    return torch.where(torch.isfinite(base), base, weight.detach()).to(weight.dtype)


def _is_known(module: Any, adapter: str, merged: list[str]) -> bool:
    """Whether the release's own DoRA is merged now, and before it LoRA or DoRA, all of which are still there."""
    kinds, norms = module.lora_variant, module._caches
    return type(kinds[adapter]) in _DORA and all(
        (name in module.lora_A or name in module.lora_embedding_A)
        and (name not in kinds or (type(kinds[name]) in _DORA and f"{name}-weight_norm" in norms))
        for name in merged
    )


def _factor(module: Any, adapter: str) -> torch.Tensor | None:
    """By what the release multiplied the weight when it merged this adapter, in the weight's shape; None for LoRA."""
    if adapter not in module.lora_variant:
        return None
    factor = module.lora_magnitude_vector[adapter].weight.detach() / module._caches[f"{adapter}-weight_norm"]
    kind = type(module.lora_variant[adapter])
    if kind in _CONVOLUTIONS:
        return factor.view(*module._get_dora_factor_view())
    return factor.view(1, -1) if kind is _EMBEDDING or module.fan_in_fan_out else factor.view(-1, 1)
