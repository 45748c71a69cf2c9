"""How far the engine's log-probabilities are from the trainer's, of tensors that are in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_ROWS = 64
"""At once: a batch can have thousands of long ones, and the process that drives a run little memory."""


def on_host(*tensors: Any) -> bool:
    """Whether all are tensors, and none is on a device that one would have to wait for."""
    return all(getattr(getattr(tensor, "device", None), "type", None) == "cpu" for tensor in tensors)


def mean_of(parts: Iterable[tuple[Any, Any, Any]]) -> float | None:
    """Mean over the sampled tokens of |trainer - engine|, in nats.

    A token of which one of the two says that it cannot be, -inf, does not count: where only the likeliest tokens are
    sampled from, rounding decides which is the last one of these.

    Args:
        parts: of each part of a batch the trainer's log-probabilities, the engine's, and a mask, 1 or True for the
            tokens that were sampled: of one shape.

    Returns:
        None where a tensor is not on the CPU, shapes differ, or nothing counts.
    """
    total, count = 0.0, 0
    for trainer, engine, mask in parts:
        if not on_host(trainer, engine, mask) or not trainer.shape == engine.shape == mask.shape:
            return None
        for start in range(0, len(trainer), _ROWS):
            rows = slice(start, start + _ROWS)
            difference = (trainer[rows].double() - engine[rows].double()).abs()
            kept = difference[mask[rows].bool() & ~difference.isinf()]
            total, count = total + kept.sum().item(), count + kept.numel()
    return total / count if count else None
