"""The law of the window: a window's gradient is a weighted sum of its micro-batches' own gradients.

Each micro-batch's own gradient is that of its loss by itself: no accumulation, no other rank. The weights say what the
training loop made of the window: shares of the tokens, or one part each, are right; all 1 is a missing division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    of_the_even: float | None = None
    """By how much too much there is of what is a mean whatever the law is; None where it is not that."""


def limit(noise: float) -> float:
    """Above which a deviation is none of rounding."""
    return max(FLOOR, _TIMES_NOISE * noise)


def judge(
    used: torch.Tensor,
    own: torch.Tensor,
    laws: Mapping[str, Sequence[float]],
    noise: float,
    evenly: torch.Tensor | None = None,
) -> Window:
    """Hold a window's gradient against its micro-batches'.

    Args:
        used: the window's gradient, one dimension, float64.
        own: the micro-batches' own, a row each.
        laws: weights that are right, by what they are called.
        noise: how far the same gradient moves by rounding, a share of its size.
        evenly: what of ``own`` is a mean over micro-batches whatever the law is, as a router's loss is.

    Returns:
        which law holds; else the factor over the nearest law, or the weights.
    """
    size = float(used.norm()) or 1.0
    fit = torch.linalg.lstsq(own.T, used[:, None], driver="gelsd").solution[:, 0]
    left = float((used - fit @ own).norm()) / size
    by_a_law, mean = (own, torch.zeros_like(used)) if evenly is None else (own - evenly, evenly.mean(0))
    should_be = {name: torch.tensor(weights, dtype=own.dtype) @ by_a_law + mean for name, weights in laws.items()}
    by_law = {name: float((used - right).norm()) / size for name, right in should_be.items()}
    best = min(by_law, key=lambda name: by_law[name])
    weights = tuple(float(weight) for weight in fit)
    if by_law[best] <= limit(noise):
        return Window(best, by_law[best], weights, left, 1.0, best)
    factors = {}
    for name, right in should_be.items():
        times = float(used @ right) / (float(right @ right) or 1.0)
        factors[name] = times, float((used - times * right).norm()) / size
    nearest = min(factors, key=lambda name: factors[name][1])
    times, rest = factors[nearest]
    factor = times if rest <= limit(noise) else None
    found = Window("", by_law[nearest], weights, left, factor, nearest)
    if evenly is None or factor is not None:
        return found
    for name, right in should_be.items():
        more = float((used - right) @ mean) / (float(mean @ mean) or 1.0)
        if float((used - right - more * mean).norm()) / size <= limit(noise):
            return replace(found, nearest=name, of_the_even=1 + more)
    return found
