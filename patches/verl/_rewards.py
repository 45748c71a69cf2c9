"""Moves rewards to the tokens that earned them, for verl's advantage estimators."""

from __future__ import annotations

import torch

import rlhf_patches

_NAME = "verl-reward-on-answer"


def on_tokens_that_count(rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Add each reward on a token that does not count to the last token before it that counts.

    Rewards on tokens that do not count remain there, and the caller drops them. Where there is nothing to add, the
    tensor itself is returned.

    Args:
        rewards, response_mask: ``[responses, tokens]``.
    """
    if rewards.shape != response_mask.shape:
        return rewards
    counts = response_mask > 0
    elsewhere = rewards.masked_fill(counts, 0)
    if not elsewhere.any():
        rlhf_patches.decided(_NAME, False)
        return rewards
    positions = torch.arange(rewards.shape[-1], device=rewards.device)
    # Before the first token that counts it is token 0, which does not count either.
    last = torch.where(counts, positions, 0).cummax(dim=-1).values
    moved = rewards.scatter_add(-1, last, elsewhere)
    if moved.is_cpu:  # as verl's trainer has it; the values on a GPU would have to be waited for
        rlhf_patches.decided(_NAME, bool(((moved != rewards) & counts).any()))
    return moved
