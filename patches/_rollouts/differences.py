"""The difference between the engine's and the trainer's log-probabilities, for tensors in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_ROWS = 64
"""Rows per step: a batch can have thousands of long rows, and the process that drives a run has little memory."""


def on_host(*tensors: Any) -> bool:
    """Whether all are tensors on the CPU, so that reading them does not wait for a device."""
    return all(getattr(getattr(tensor, "device", None), "type", None) == "cpu" for tensor in tensors)


def mean_of(parts: Iterable[tuple[Any, Any, Any]]) -> float | None:
    """Mean over the sampled tokens of |trainer - engine|, in nats.

    A token does not count if one of the two log-probabilities is -inf: where only the likeliest tokens are sampled,
    rounding decides which token is the last of these.

    Args:
        parts: for each part of a batch, the trainer's log-probabilities, the engine's, and a mask, 1 or True for the
            sampled tokens, all of one shape.

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
