"""What a micro-batch is of its mini-batch: what verl's policy losses call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def part_of_the_mean(mean: torch.Tensor, of_rows: torch.Tensor, config: Any) -> torch.Tensor:
    """A micro-batch's mean as its part of that of the global mini-batch: of a whole one the mean itself, bit for bit.

    As it is where nobody has said how large the mini-batch is: the older workers divide by themselves.

    Args:
        mean: of ``of_rows``.
        of_rows: one loss for each sequence.
        config: the actor's, in which `ppo_loss` notes the numbers of the mini-batch.
    """
    numbers = getattr(config, "global_batch_info", None) or {}
    rows, ranks = numbers.get("global_batch_size"), numbers.get("dp_size")
    if not rows or not ranks:
        return mean
    return mean * (len(of_rows) * ranks / rows)
