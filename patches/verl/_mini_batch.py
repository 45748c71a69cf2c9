"""A micro-batch's share of its mini-batch, for verl's policy losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def part_of_the_mean(mean: torch.Tensor, of_rows: torch.Tensor, config: Any) -> torch.Tensor:
    """Scale a micro-batch's mean to its share of the mean over the global mini-batch.

    The mean of a whole mini-batch keeps every bit. Where the configuration does not hold the size of the mini-batch,
    the mean is returned as it is: the older workers divide themselves.

    Args:
        mean: of ``of_rows``.
        of_rows: one loss for each sequence.
        config: the actor's, in which `ppo_loss` stores the numbers of the mini-batch.
    """
    numbers = getattr(config, "global_batch_info", None) or {}
    rows, ranks = numbers.get("global_batch_size"), numbers.get("dp_size")
    if not rows or not ranks:
        return mean
    return mean * (len(of_rows) * ranks / rows)
