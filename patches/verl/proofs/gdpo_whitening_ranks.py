"""verl's GDPO on responses of several lengths, and its definition in float64: ``--out FOLDER``, on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlhf_patches.patches.verl.proofs.advantages import LENGTH, differences, estimate, lengths_as_mask
from rlhf_patches.proving import states

GROUPS = "aaaabbbb"
REWARDS = {"right": (1, 0, 0, 1, 1, 1, 0, 1), "short": (0.9, 0.1, 0.4, 1.0, 0.2, 0.7, 0.0, 0.5)}
# verl's epsilons of the groups and of the batch.
OF_GROUPS, OF_BATCH = 1e-6, 1e-8
CASES: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": (1, 12, 9, 2, 8, 3, 12, 5)},
    "weights": {"lengths": (1, 12, 9, 2, 8, 3, 12, 5), "weights": [1.0, 0.25]},
    "a tool's answer": {"lengths": (1, 12, 9, 2, 8, 3, 12, 5), "answer": True},
    "without a token": {"lengths": (1, 12, 9, 2, 8, 3, 12, 5), "left out": 4},
    "one length": {"lengths": (7,) * 8},
    "one response": {"lengths": (5,)},
}


def masks(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that exist, and the tokens that count."""
    there = lengths_as_mask(*case["lengths"])
    counted = there.clone()
    if case.get("answer"):
        counted[1, 2:10] = 0
    if "left out" in case:
        counted[case["left out"]] = 0
    return there, counted


def exactly(case: dict[str, Any]) -> torch.Tensor:
    """Sums of the groups' normalized rewards, normalized over responses, with unbiased variances."""
    _, counted = masks(case)
    rows = range(len(case["lengths"]))
    total = torch.zeros(len(rows), dtype=torch.float64)
    for weight, rewards in zip(case.get("weights", [1.0, 1.0]), REWARDS.values(), strict=True):
        for row in rows:
            group = torch.tensor([float(rewards[other]) for other in rows if GROUPS[other] == GROUPS[row]])
            mean, deviation = (group.double().mean(), group.double().std()) if len(group) > 1 else (0.0, 1.0)
            total[row] += weight * (rewards[row] - mean) / (deviation + OF_GROUPS)
    present = total[counted.any(-1)]
    variance = present.var() if len(present) > 1 else torch.tensor(0.0)
    return ((total - present.mean()) / (variance + OF_BATCH).sqrt())[:, None] * counted


def observe() -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        there, counted = masks(case)
        rows = len(there)
        tensors = {
            "prompts": torch.ones(rows, 3, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(rows, 3, dtype=torch.long), there], 1),
        }
        others = {reward: np.array(values[:rows]) for reward, values in REWARDS.items()}
        settings = {"gdpo_reward_keys": list(REWARDS), "gdpo_reward_weights": case.get("weights")}
        groups = list(GROUPS[:rows])
        advantages, returns = estimate(
            "gdpo", torch.zeros(rows, LENGTH), counted, groups, (tensors, others), **settings
        )
        of_responses = advantages.sum(1)[counted.any(-1)] / counted.sum(1)[counted.any(-1)]
        found[name] = {
            **differences(advantages, exactly(case)),
            "mean": of_responses.mean().item(),
            "deviation": of_responses.std().item() if rows > 1 else None,
            "returns": torch.equal(advantages, returns),
        }
        masks_of_types = [counted.bool(), counted.float()] if name == "lengths" else []
        found[name]["types"] = [
            torch.equal(
                estimate("gdpo", torch.zeros(rows, LENGTH), of_type, groups, (tensors, others), **settings)[0],
                advantages,
            )
            for of_type in masks_of_types
        ]
    return found


def main() -> None:
    states.report("verl-gdpo-whitening", observe, states.parser().parse_args().out)
