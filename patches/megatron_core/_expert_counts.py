"""For megatron-core-expert-bias-counts: keeps a router's token counters in float32."""

from __future__ import annotations

from typing import Any

import torch

_HALF = (torch.bfloat16, torch.float16)


def in_float32(counts: Any) -> Any:
    """Counters in float32 if they are in 16 bits; any other object unchanged."""
    return counts.float() if isinstance(counts, torch.Tensor) and counts.dtype in _HALF else counts


def keep_counts(router: Any) -> bool:
    """Put a router's counters back into float32 before the router adds to them, which it does only with gradients.

    Args:
        router: megatron-core's TopKRouter, at the beginning of its forward.

    Returns:
        True.
    """
    counts: Any = getattr(router, "local_tokens_per_expert", None)
    if torch.is_grad_enabled() and (exact := in_float32(counts)) is not counts:
        counts.data = exact  # writes: the precision that the router made them in
    return True
