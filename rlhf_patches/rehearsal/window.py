"""The law of the window: a window's gradient is a weighted sum of its micro-batches' own gradients.

Each micro-batch's own gradient is that of its loss by itself: no accumulation, no other rank. The weights say what the
training loop made of the window: shares of the tokens, or one part each, are right; all 1 is a missing division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

FLOOR = 1e-5
"""Below this a deviation is rounding, whatever the noise was."""
_TIMES_NOISE = 10.0


@dataclass(frozen=True)
class Window:
    """What was found."""

    law: str
    """Which of the laws the weights follow; empty where they follow none."""
    deviation: float
    """What is left of the gradient under that law, or under the nearest of them: a share of its size."""
    weights: tuple[float, ...]
    """By least squares."""
    residual: float
    """What is left of the gradient under these."""
    factor: float | None
    """By how much the gradient is larger than ``nearest`` makes it; None where that is no factor."""
    nearest: str = ""


def limit(noise: float) -> float:
    """Above which a deviation is none of rounding."""
    return max(FLOOR, _TIMES_NOISE * noise)


def judge(used: torch.Tensor, own: torch.Tensor, laws: Mapping[str, Sequence[float]], noise: float) -> Window:
    """Hold a window's gradient against its micro-batches'.

    Args:
        used: the window's gradient, one dimension, float64.
        own: the micro-batches' own, a row each.
        laws: weights that are right, by what they are called.
        noise: how far the same gradient moves by rounding, a share of its size.

    Returns:
        which law holds; else the factor over the nearest law, or the weights.
    """
    size = float(used.norm()) or 1.0
    fit = torch.linalg.lstsq(own.T, used[:, None], driver="gelsd").solution[:, 0]
    left = float((used - fit @ own).norm()) / size
    by_law = {
        name: float((used - torch.tensor(weights, dtype=own.dtype) @ own).norm()) / size
        for name, weights in laws.items()
    }
    best = min(by_law, key=lambda name: by_law[name])
    weights = tuple(float(weight) for weight in fit)
    if by_law[best] <= limit(noise):
        return Window(best, by_law[best], weights, left, 1.0, best)
    factors = {}
    for name, right in laws.items():
        should_be = torch.tensor(right, dtype=own.dtype) @ own
        times = float(used @ should_be) / (float(should_be @ should_be) or 1.0)
        factors[name] = times, float((used - times * should_be).norm()) / size
    nearest = min(factors, key=lambda name: factors[name][1])
    times, rest = factors[nearest]
    factor = times if rest <= limit(noise) else None
    return Window("", by_law[nearest], weights, left, factor, nearest)
