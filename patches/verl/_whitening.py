"""Normalizes advantages over the responses of a batch."""

from __future__ import annotations

import torch

import rlhf_patches


def whitened_over_responses(advantages: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Advantages with mean 0 and variance 1 over the responses that have a token that counts.

    Args:
        advantages: ``[responses, tokens]``, one number on all tokens of a response that count, and 0 elsewhere.
        response_mask: of the same shape, 1 for tokens that count.

    Returns:
        ``[responses, 1]``.
    """
    tokens = response_mask.sum(dim=-1, keepdim=True)
    present = tokens > 0
    if tokens.is_cpu:  # as verl's trainer has it; with one length it is unknown, since n - 1 is another number
        lengths = tokens[present]
        if (lengths != lengths[:1]).any():
            rlhf_patches.decided("verl-gdpo-whitening", True)
    of_response = advantages.sum(dim=-1, keepdim=True) / tokens.clamp(min=1)
    responses = present.sum()
    deviation = (of_response - of_response.sum() / responses.clamp(min=1)) * present
    variance = deviation.square().sum() / (responses - 1).clamp(min=1)
    return deviation * torch.rsqrt(variance + 1e-8)
