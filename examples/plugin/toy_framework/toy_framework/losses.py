"""Losses."""

from __future__ import annotations


def masked_mean(losses: list[float], mask: list[int]) -> float:
    """The mean of the losses that the mask keeps."""
    total = sum(loss * keep for loss, keep in zip(losses, mask, strict=True))
    return total / len(losses)
