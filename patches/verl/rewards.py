"""Where a reward belongs: what verl's estimators of advantages call."""

from __future__ import annotations

import torch


def on_tokens_that_count(rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Rewards of tokens that do not count, on the last token before them that does: what they came of.

    Where there is none before them they stay as they are. The tensor itself where nothing has to move.

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
    last = torch.where(counts, positions, -1).cummax(dim=-1).values
    elsewhere = elsewhere.masked_fill(last < 0, 0)
    moved = torch.zeros_like(rewards).scatter_add_(-1, last.clamp(min=0), elsewhere)  # writes: a tensor of its own
    return torch.where(moved != 0, rewards + moved, rewards.masked_fill(elsewhere != 0, 0))
