"""Where a reward belongs: what verl's estimators of advantages call."""

from __future__ import annotations

import torch


def on_tokens_that_count(rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Rewards, with those of tokens that do not count added to the last token before them that does: they came of it.

    What is on tokens that do not count themselves is left to the caller, which drops it. The tensor itself where
    nothing has to be added.

    Args:
        rewards, response_mask: ``[responses, tokens]``.
    """
    if rewards.shape != response_mask.shape:
        return rewards
    counts = response_mask > 0
    elsewhere = rewards.masked_fill(counts, 0)
    if not elsewhere.any():
        return rewards
    positions = torch.arange(rewards.shape[-1], device=rewards.device)
    # Before the first token that counts it is token 0, which does not count either.
    last = torch.where(counts, positions, 0).cummax(dim=-1).values
    return rewards.scatter_add(-1, last, elsewhere)
