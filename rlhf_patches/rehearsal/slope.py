"""Directional derivative: the loss a small step along its gradient, relative to the gradient's size."""

from __future__ import annotations

import torch

from .relation import Relation, Verdict, not_checked
from .replay import Call, Replay
from .sharding import Whole

NAME = "directional derivative"
_SMOOTH = 0.03
_STILL = 1e-3
_FINE = 1e-5


def relation(call: Call, where: Whole, replay: Replay, noise: float) -> Relation:
    """Compare the change of a micro-batch's loss with its gradient. The weights are restored.

    Args:
        call: a micro-batch.
        where: where the run's parameters are.
        replay: computes the micro-batch's loss and gradient.
        noise: the relative rounding error of a repeated gradient.
    """
    if why := where.coarse():
        return not_checked(NAME, why)
    if replay.little:
        return not_checked(NAME, "with --memory low: it needs the whole gradient and a copy of the weights")
    if noise > _FINE:
        return not_checked(NAME, f"the loss's precision is too low (noise {noise:.0e})")
    gradients = replay.own(call)
    size = sum(float(each.double().pow(2).sum()) for each in gradients if each is not None) ** 0.5
    step = 1e-3 * max(abs(call.loss), 0.1) / size / size if size else 0.0
    kept = [each.detach().clone() for each in where.parameters]

    def at(along: float) -> float:
        with torch.no_grad():
            for parameter, value, gradient in zip(where.parameters, kept, gradients, strict=True):
                parameter.copy_(value if gradient is None else value + along * gradient)
        return float(replay.alone(call).detach().double())

    try:
        rise = at(step) - at(-step)
    finally:
        with torch.no_grad():
            for parameter, value in zip(where.parameters, kept, strict=True):
                parameter.copy_(value)
    if not size:
        return not_checked(NAME, "the gradient is 0")
    ratio = rise / (2 * step) / size**2
    if abs(ratio) < _STILL:
        return not_checked(NAME, "the loss is constant: it compares the model with itself, as GRPO's first step does")
    if abs(ratio - 1) <= _SMOOTH:
        return Relation(NAME, Verdict.HOLDS, f"{ratio:.3f}")
    text = "relative to the gradient: a part of the loss is detached or not smooth, or a backward pass is wrong"
    return Relation(NAME, Verdict.NOTE, f"{ratio:.3f}", text)
