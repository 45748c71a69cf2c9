"""verl's rollout correction and its trainer's advantages: ``--out FOLDER [ESTIMATOR ...]``, one rank.

`compute_rollout_correction_and_add_to_batch` rejects responses, and the estimator of verl's registry gets what it has
left, as the trainers hand it over.
"""

from __future__ import annotations

import importlib
import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlhf_patches.patches.verl.proofs.advantages import at_the_end, differences, lengths_as_mask
from rlhf_patches.proving import states

NAME = "verl-rejected-in-group"
ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "reinforce_plus_plus_baseline")
PROMPTS = "aaaabbbb"
REWARDS = (1.0, 0.0, 0.0, 5.0, 1.0, 0.3, 0.0, -2.0)
REJECTED = (3, 7)
LENGTHS = (3, 12, 7, 1, 9, 4, 12, 6)
EPSILON = 1e-6


def batch(rejected: tuple[int, ...] = REJECTED, thresholds: str = "seq_sum_k1") -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and mask after rollout correction: the log-probabilities of some responses are 3 apart."""
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    mask = lengths_as_mask(*LENGTHS)
    rewards = at_the_end(torch.tensor(REWARDS), mask)
    log_probs = torch.full(mask.shape, -2.0)
    rollout = log_probs.clone()
    rollout[list(rejected), 0] += 3
    data = SimpleNamespace(
        batch={"old_log_probs": log_probs, "rollout_log_probs": rollout, "response_mask": mask},
    )
    data.union = lambda other: data
    names = helper.SUPPORTED_ROLLOUT_RS_OPTIONS if hasattr(helper, "SUPPORTED_ROLLOUT_RS_OPTIONS") else ()
    of_release: dict[str, Any] = {"rollout_rs": thresholds, "rollout_rs_threshold": "0.5_2.0"}
    if thresholds not in names:  # 0.6.1 and 0.7.0 call it otherwise
        of_release = {
            "rollout_rs": "sequence",
            "rollout_rs_threshold": 2.0,
            "rollout_rs_threshold_lower": 0.5,
        }
    helper.compute_rollout_correction_and_add_to_batch(data, of_release)
    return rewards, data.batch["response_mask"]


def estimate(name: str, rewards: torch.Tensor, mask: torch.Tensor, prompts: Any) -> torch.Tensor:
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    config = importlib.import_module("verl.trainer.config").AlgoConfig(adv_estimator=name)
    estimator = core_algos.get_adv_estimator_fn(name)
    found: torch.Tensor = estimator(
        token_level_rewards=rewards.clone(), response_mask=mask, config=config, index=prompts
    )[0]
    return found


def names(prompts: str = PROMPTS) -> Any:
    return np.array(list(prompts), dtype=object)


def expected(estimator: str, mask: torch.Tensor, prompts: str = PROMPTS) -> torch.Tensor:
    """Of the responses that are kept, each within the kept ones of its prompt (arXiv:2402.03300, 2402.14740)."""
    kept = [row for row, own in enumerate(mask.sum(-1).tolist()) if own]
    advantages = torch.zeros(len(REWARDS), dtype=torch.float64)
    for row in kept:
        group = [REWARDS[other] for other in kept if prompts[other] == prompts[row]]
        mean = statistics.fmean(group) if len(group) > 1 else 0.0
        of_row = REWARDS[row] - mean
        if estimator.startswith("grpo"):
            of_row /= (statistics.stdev(group) if len(group) > 1 else 1.0) + EPSILON
        elif estimator == "rloo" and len(group) > 1:
            of_row *= len(group) / (len(group) - 1)
        advantages[row] = of_row
    if estimator != "reinforce_plus_plus_baseline":
        return advantages[:, None] * mask
    tokens = torch.cat([advantages[row].repeat(int(mask[row].sum())) for row in kept])
    whitened = (advantages - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8)
    return whitened[:, None] * mask


def main(observe: Any = None) -> None:
    def of_estimators(chosen: list[str]) -> dict[str, Any]:
        rewards, mask = batch()
        found = {}
        for name in chosen:
            advantages = estimate(name, rewards, mask, names())
            found[name] = differences(advantages, expected(name, mask)) | {"kept": mask.sum(-1).tolist()}
        return found

    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*ESTIMATORS])
    options = parser.parse_args()
    states.report_cases(NAME, observe or of_estimators, options.cases, options.out, reverted=options.cases)
