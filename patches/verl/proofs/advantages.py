"""verl's advantage estimators, called like its trainer's compute_advantage calls them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

LENGTH = 12


def estimate(
    name: str, rewards: torch.Tensor, mask: torch.Tensor, groups: Any = None, batch: Any = None, **algorithm: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, from verl's registry.

    Args:
        name: ``algorithm.adv_estimator``.
        rewards, mask: ``[responses, tokens]``.
        groups: the prompt of each response.
        batch: tensors and other values of the batch, which GDPO reads itself.
        algorithm: further settings of ``algorithm``.
    """
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    config = importlib.import_module("verl.trainer.config").AlgoConfig(adv_estimator=name, **algorithm)
    more: dict[str, Any] = {} if groups is None else {"index": np.array(groups)}
    if batch is not None:
        more["batch"], more["non_tensor_batch"] = batch
    estimator = core_algos.get_adv_estimator_fn(name)
    found: tuple[torch.Tensor, torch.Tensor] = estimator(
        token_level_rewards=rewards.clone(), response_mask=mask, config=config, **more
    )
    return found


def lengths_as_mask(*lengths: int) -> torch.Tensor:
    """The mask of responses of these lengths, padded on the right."""
    return (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()


def at_the_end(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each response's score on its last token."""
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(mask)), mask.sum(-1).clamp(min=1) - 1] = scores
    return rewards


def differences(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """The largest difference, and the values for tests that compare bits."""
    return {"error": (found.double() - expected).abs().max().item(), "found": found.tolist()}
