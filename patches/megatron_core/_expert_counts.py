"""For megatron-core-expert-bias-counts: a router's counters of tokens, in the precision that it made them in."""

from __future__ import annotations

from typing import Any

import torch

_HALF = (torch.bfloat16, torch.float16)


def in_float32(counts: Any) -> Any:
    """Counters that may be in a model's precision, in float32; all else as it is."""
    return counts.float() if isinstance(counts, torch.Tensor) and counts.dtype in _HALF else counts


def keep_counts(router: Any) -> bool:
    """Put a router's counters back into float32 before they are added to, which it does with gradients only.

    Args:
        router: megatron-core's TopKRouter, at the beginning of its forward.

    Returns:
        True.
    """
    counts: Any = getattr(router, "local_tokens_per_expert", None)
    if torch.is_grad_enabled() and (exact := in_float32(counts)) is not counts:
        counts.data = exact  # writes: the precision that the router made them in
    return True
