"""Micro-batch weights: a window's gradient is a weighted sum of its micro-batches' own gradients.

A micro-batch's own gradient is the gradient of its loss alone: no accumulation, no other rank. Weights in proportion to
the tokens, or equal weights that sum to 1, are correct; weights of 1 mean a missing division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

FLOOR = 1e-5
"""A deviation below this is rounding, for any noise."""
_TIMES_NOISE = 10.0
SCALE = 0.7310585786300049
"""Scaling the loss by this and the gradient by its inverse changes only the rounding."""


@dataclass(frozen=True)
class Window:
    """The result for one window. A law is a set of correct weights."""

    law: str
    """The law that the weights follow; empty if they follow none."""
    deviation: float
    """The relative residual of the gradient under that law, or under the nearest one."""
    weights: tuple[float, ...]
    """The least-squares weights."""
    residual: float
    """The relative residual under the least-squares weights."""
    factor: float | None
    """The ratio of the gradient to that of ``nearest``; None if they are not proportional."""
    nearest: str = ""
    of_the_even: float | None = None
    """The weight of the part that is always a mean over micro-batches; None if that is not the deviation."""


def limit(noise: float) -> float:
    """Return the limit above which a deviation is not rounding."""
    return max(FLOOR, _TIMES_NOISE * noise)


def judge(
    used: torch.Tensor,
    own: torch.Tensor,
    laws: Mapping[str, Sequence[float]],
    noise: float,
    evenly: torch.Tensor | None = None,
) -> Window:
    """Compare a window's gradient with its micro-batches' gradients.

    Args:
        used: the window's gradient, a float64 vector.
        own: the micro-batches' own gradients, one row each.
        laws: correct weights by name.
        noise: the relative rounding error of a repeated gradient.
        evenly: the part of ``own`` that is always a mean over micro-batches, such as a router's loss.

    Returns:
        the law that holds; else the factor over the nearest law, or the weights.
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
    result = Window("", by_law[nearest], weights, left, factor, nearest)
    if evenly is None or factor is not None:
        return result
    for name, right in should_be.items():
        more = float((used - right) @ mean) / (float(mean @ mean) or 1.0)
        if float((used - right - more * mean).norm()) / size <= limit(noise):
            return replace(result, nearest=name, of_the_even=1 + more)
    return result
