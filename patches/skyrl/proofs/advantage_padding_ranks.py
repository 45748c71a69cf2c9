"""SkyRL's advantages, normalized, and the gradient of its policy loss: ``--out FOLDER [CASE ...]``, on one rank.

The estimators, `RayPPOTrainer._normalize_advantages` (0.1.0: `normalize_advantages_dict`) and `ppo_policy_loss` of the
release on sys.path.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.skyrl.proofs import modules
from rlhf_patches.proving import states

UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils"
GAMMA, LAMBDA, CLIP = 0.9, 0.8, 0.2
GROUPS, REWARDS = (0, 0, 1, 1), (1.0, 0.0, 0.7, 0.2)
ESTIMATORS, LENGTHS = ("grpo", "gae"), (9, 30)
ON_PADDING = 0.6
"""What a critic says of tokens that nobody generated."""


def rows(mean: float, seed: int) -> list[list[float]]:
    """One number for each token of each response."""
    generator = torch.Generator().manual_seed(seed)
    return [(mean + 0.3 * torch.randn(length, generator=generator)).tolist() for length in (9, 4, 6, 2)]


class Tokenizer(int):
    """What SkyRL takes as one; since 0.4.0 the number of the padding's token."""

    pad_token_id = 0


def placed(lengths: list[int], length: int) -> torch.Tensor:
    """Where SkyRL puts the tokens of responses: at the left edge in 0.1.0, at the right edge since 0.2.0."""
    of_batch = importlib.import_module("skyrl.train.dataset.preprocess").convert_prompts_responses_to_batch_tensors
    numbers = [[1] * own for own in lengths]
    rewards = [[0.0] * own for own in lengths]
    mask: torch.Tensor = of_batch(Tokenizer(), [[1] for _ in lengths], numbers, rewards, numbers)[2].bool()
    more = length - mask.shape[1]
    return torch.nn.functional.pad(mask, (more, 0) if mask[:, -1].all() else (0, more))


def padded(ragged: list[list[float]], mask: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    numbers = torch.tensor([number for row in ragged for number in row])
    return torch.full(mask.shape, value).masked_scatter(mask, numbers)


def normalized(data: Any, algorithm: Any) -> torch.Tensor:
    """The advantages of the whole batch as one mini-batch."""
    trainer: Any = importlib.import_module("skyrl.train.trainer").RayPPOTrainer
    if not hasattr(trainer, "_normalize_advantages"):  # 0.1.0
        found: torch.Tensor = importlib.import_module(UTILS).normalize_advantages_dict(data)["advantages"]
        return found
    it = trainer.__new__(trainer)
    it.cfg = SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm, micro_train_batch_size_per_gpu=1))
    found = it._normalize_advantages(data, [(0, len(data["advantages"]))])["advantages"]
    return found


def gradient(estimator: str, length: int, given: dict[str, Any]) -> list[list[float]]:
    """Of the loss, for each log-probability of each response; padding has none."""
    ppo_utils = importlib.import_module(UTILS)
    batches = importlib.import_module("skyrl.backends.skyrl_train.training_batch")
    algorithm = SimpleNamespace(
        advantage_batch_normalize=True,
        loss_reduction="token_mean",
        max_seq_len=length,
        policy_loss_type="regular",
        eps_clip_low=CLIP,
        eps_clip_high=CLIP,
        off_policy_correction=None,
    )
    there = placed([len(row) for row in given["values"]], length)
    mask = there.float()
    at_the_end = [[0.0] * (len(row) - 1) + [reward] for row, reward in zip(given["values"], REWARDS, strict=True)]
    advantages, _ = ppo_utils.compute_advantages_and_returns(
        token_level_rewards=padded(at_the_end, there),
        response_mask=mask,
        index=list(GROUPS),
        adv_estimator=estimator,
        config=algorithm,
        values=padded(given["values"], there, ON_PADDING),
        gamma=GAMMA,
        lambd=LAMBDA,
        grpo_norm_by_std=True,
    )
    data = batches.TrainingInputBatch({"advantages": advantages, "response_mask": mask, "loss_mask": mask})
    log_probs = padded(given["log_probs"], there).requires_grad_()
    loss, _ = ppo_utils.ppo_policy_loss(
        log_probs, padded(given["old_log_probs"], there), normalized(data, algorithm), algorithm, loss_mask=mask
    )
    loss.backward()
    assert log_probs.grad is not None
    assert not log_probs.grad[~there].any()
    return [row[own].tolist() for row, own in zip(log_probs.grad, there, strict=True)]


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[f"{name}, {length}" for name in ESTIMATORS for length in LENGTHS])
    options = parser.parse_args()
    modules.install()
    modules.trainer()
    given: dict[str, Any] = {"values": rows(0.3, 1), "log_probs": rows(-1.0, 2), "old_log_probs": rows(-1.0, 3)}
    constants = {"groups": GROUPS, "rewards": REWARDS, "gamma": GAMMA, "lambda": LAMBDA, "clip": CLIP}
    states.report(
        "skyrl-advantage-padding",
        lambda: {
            "given": given | constants | {"on padding": ON_PADDING},
            **{case: gradient(case.split(", ")[0], int(case.split(", ")[1]), given) for case in options.cases},
        },
        options.out,
    )
