"""SkyRL's trainer on a batch whose samples are steps: ``--out FOLDER [CASE ...]``, on one rank.

`RayPPOTrainer.convert_to_training_input` and `compute_advantages_and_returns` of the release on sys.path.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.skyrl.proofs import modules
from rlhf_patches.proving import states

NAME = "skyrl-step-wise-advantages"
UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils"
GROUPS, REWARDS = ("a", "a", "b", "b"), (1.0, 0.0, 0.7, 0.2)
STEPS = ((7, 4, 2), (3, 5), (2, 6), (4,))
"""The tokens of each trajectory's steps."""


class Tokenizer(int):
    """What SkyRL takes as one."""

    pad_token_id = 0


def made(estimator: str, step_wise: bool, ranks: int) -> Any:
    """The trainer, of what the two methods read."""
    trainer: Any = modules.trainer().RayPPOTrainer
    correction = SimpleNamespace(tis_ratio_type=None, sequence_mask_metric=None)
    algorithm = SimpleNamespace(
        advantage_estimator=estimator,
        gamma=0.9,
        lambd=0.8,
        grpo_norm_by_std=True,
        off_policy_correction=correction,
    )
    it = trainer.__new__(trainer)
    it.cfg = SimpleNamespace(
        trainer=SimpleNamespace(algorithm=algorithm), generator=SimpleNamespace(step_wise_trajectories=step_wise)
    )
    it.tokenizer, it.all_metrics = Tokenizer(), {}
    it.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: ranks)
    return it


def advantages(
    estimator: str, step_wise: bool = True, ranks: int = 1, of: tuple[tuple[int, ...], ...] = STEPS
) -> tuple[list[list[float]], float]:
    """Of each sample's tokens; and the largest advantage beside them."""
    it = made(estimator, step_wise, ranks)
    preprocess = importlib.import_module("skyrl.train.dataset.preprocess")
    module: Any = modules.trainer()
    module.convert_prompts_responses_to_batch_tensors = preprocess.convert_prompts_responses_to_batch_tensors
    samples = [(number, steps, step) for number, steps in enumerate(of) for step in range(len(steps))]
    if not step_wise:
        samples = [sample for sample in samples if sample[2] == len(sample[1]) - 1]
    lengths = [steps[step] for _, steps, step in samples]
    last = [step == len(steps) - 1 for _, steps, step in samples]
    output = {
        "prompt_token_ids": [[1, 2] for _ in samples],
        "response_ids": [[3] * length for length in lengths],
        "loss_masks": [[1] * length for length in lengths],
        "rewards": [
            [0.0] * (length - 1) + [REWARDS[number] * is_last]
            for (number, _, _), length, is_last in zip(samples, lengths, last, strict=True)
        ],
        "is_last_step": last,
        "trajectory_ids": [SimpleNamespace(to_string=lambda number=number: str(number)) for number, _, _ in samples],
    }
    batch = it.convert_to_training_input(output, [GROUPS[number] for number, _, _ in samples])
    if estimator in ("gae", "reinforce++"):
        batch["values"] = torch.full(batch["response_mask"].shape, 0.3)
    else:
        batch["values"] = None
    data = it.compute_advantages_and_returns(batch)
    if estimator in ("grpo", "rloo"):
        assert torch.equal(data["advantages"], data["returns"])
    beside = float((data["advantages"] * (data["response_mask"] == 0)).abs().max())
    return [row[:length].tolist() for row, length in zip(data["advantages"], lengths, strict=False)], beside


CASES = {"grpo": ("grpo",), "rloo": ("rloo",)}


def main(cases: dict[str, tuple[Any, ...]] = CASES) -> None:
    def observe(names: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {"given": {"groups": GROUPS, "rewards": REWARDS, "steps": STEPS}, "beside": {}}
        for name in names:
            found[name], found["beside"][name] = advantages(*cases[name])
        return found

    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*cases])
    options = parser.parse_args()
    modules.install()
    states.report_cases(NAME, observe, options.cases, options.out)
