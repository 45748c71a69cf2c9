"""The weight of a Gated DeltaNet's norm, where ranks have some of its heads each: marked, and recognised."""

from __future__ import annotations

from typing import Any

_MARK = "summed_over_divided_heads"


def mark(norm: Any, ranks: int) -> None:
    """Mark the norm's weight if its heads are divided over ranks.

    Megatron marks parameters the same way, with ``sequence_parallel``: what keeps that one keeps this one.
    """
    if ranks > 1:
        for parameter in norm.parameters():
            setattr(parameter, _MARK, True)  # writes: the mark by which its gradient is summed


def is_marked(parameter: Any) -> bool:
    """Whether a rank's gradient of this parameter is a part of a sum over the ranks that share a layer."""
    return getattr(parameter, _MARK, False)
