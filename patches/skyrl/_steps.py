"""Advantages of step-wise trajectories: one number for each trajectory, at the tokens of each of its steps."""

from __future__ import annotations

import sys
from typing import Any

import rlhf_patches

from .._released import is_released

NAME = "skyrl-step-wise-advantages"
_MODULE = "skyrl.backends.skyrl_train.utils.ppo_utils"
_OF_OUTCOMES = {"grpo": "compute_grpo_outcome_advantage", "rloo": "compute_rloo_outcome_advantage"}
"""The estimators that multiply one number by the mask, and do nothing else with it."""


def are_trained(self: Any) -> bool | None:
    """Whether steps are samples; `mask_of_last_steps` then decides."""
    return None if self.cfg.generator.step_wise_trajectories else False


def mask_of_last_steps(response_mask: Any, is_last_step: Any, estimator: Any) -> Any:
    """Where the estimator puts the advantages of the last steps: everywhere, to be multiplied by other masks."""
    of_last = response_mask[is_last_step]
    if not _is_of_outcomes(estimator):
        rlhf_patches.decided(NAME, False)
        return of_last
    rlhf_patches.decided(NAME, _some_are_longer(response_mask, is_last_step, of_last))
    return of_last.new_ones(of_last.shape)


def of_own_tokens(values: Any, response_mask: Any, estimator: Any) -> Any:
    """Advantages or returns at the tokens of each step."""
    return values * response_mask if _is_of_outcomes(estimator) else values


def _is_of_outcomes(name: Any) -> bool:
    """Whether the name stands for the release's own GRPO or RLOO."""
    released = sys.modules[_MODULE]
    function = getattr(released, _OF_OUTCOMES.get(str(name), ""), None)
    # known: the release's own functions; another one that is registered under the name is not this object
    return (
        function is not None
        and released.AdvantageEstimatorRegistry._functions.get(str(name)) is function
        and is_released(function, ("skyrl",))
        and is_released(released.compute_advantages_and_returns, ("skyrl",))
    )


def _some_are_longer(response_mask: Any, is_last_step: Any, of_last: Any) -> bool:
    """Whether a step has tokens where its trajectory's last step has none; all is on the CPU, in the trainer."""
    if not is_last_step[-1]:
        return False  # SkyRL raises
    trajectories = is_last_step.int().cumsum(dim=0) - is_last_step.int()
    return bool((response_mask.bool() & ~of_last.bool()[trajectories]).any())
