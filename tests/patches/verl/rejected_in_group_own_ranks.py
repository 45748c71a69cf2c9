"""The proof's worker of verl-rejected-in-group with batches and names of prompts that the patch leaves alone."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from rlhf_patches.patches.verl.proofs import rejected_in_group_ranks as worker
from rlhf_patches.patches.verl.proofs.advantages import differences

NUMBERS = [ord(prompt) for prompt in worker.PROMPTS]
NAMES: dict[str, Any] = {
    "numbers": np.array(NUMBERS),
    "numbers as objects": np.array(NUMBERS, dtype=object),
    "a tensor": torch.tensor(NUMBERS),
}


def observe(estimators: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rewards, mask = worker.batch()
    _, all_kept = worker.batch(())
    alone_rewards, alone = worker.batch((1, 2, 3))
    found["masks"] = {"rejected": mask.sum(-1).tolist(), "alone": alone.sum(-1).tolist()}
    for name in estimators:
        found[name] = differences(worker.estimate(name, rewards, mask, worker.names()), worker.expected(name, mask))
        found[f"{name}, alone"] = differences(
            worker.estimate(name, alone_rewards, alone, worker.names()), worker.expected(name, alone)
        )
        found[f"{name}, none rejected"] = worker.estimate(name, rewards, all_kept, worker.names()).tolist()
        in_part = all_kept.clone()
        in_part[1, :5] = 0
        found[f"{name}, rejected in part"] = worker.estimate(name, rewards, in_part, worker.names()).tolist()
        whole = mask.clone()
        whole[4:] = all_kept[4:]
        whole[:4] = 0
        found[f"{name}, whole groups"] = worker.estimate(name, rewards, whole, worker.names()).tolist()
        for kind, prompts in NAMES.items():
            if kind != "a tensor" or name == "grpo_vectorized":
                found[f"{name}, {kind}"] = worker.estimate(name, rewards, mask, prompts).tolist()
    prompts = worker.names()
    worker.estimate("grpo", rewards, mask, prompts)
    found["names"] = prompts.tolist()
    return found


def main() -> None:
    os.environ["VERL_FORCE_DEVICE"] = "cpu"  # 0.7.0's vectorized GRPO takes a module for a device otherwise
    worker.main(observe)
