"""SkyRL's advantages, normalised, and the gradient of its policy loss: ``--out FOLDER``, on one rank.

The estimators, `RayPPOTrainer._normalize_advantages` (0.1.0: `normalize_advantages_dict`) and `ppo_policy_loss` of the
release on sys.path.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from tests.harness import skyrl_on_cpu, states

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


def padded(ragged: list[list[float]], length: int, value: float = 0.0) -> torch.Tensor:
    return torch.tensor([row + [value] * (length - len(row)) for row in ragged])


def normalised(data: Any, algorithm: Any) -> torch.Tensor:
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
    """Of the loss, for each log-probability of the padded batch."""
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
    mask = padded([[1.0] * len(row) for row in given["values"]], length)
    at_the_end = [[0.0] * (len(row) - 1) + [reward] for row, reward in zip(given["values"], REWARDS, strict=True)]
    advantages, _ = ppo_utils.compute_advantages_and_returns(
        token_level_rewards=padded(at_the_end, length),
        response_mask=mask,
        index=list(GROUPS),
        adv_estimator=estimator,
        config=algorithm,
        values=padded(given["values"], length, ON_PADDING),
        gamma=GAMMA,
        lambd=LAMBDA,
        grpo_norm_by_std=True,
    )
    data = batches.TrainingInputBatch({"advantages": advantages, "response_mask": mask, "loss_mask": mask})
    log_probs = padded(given["log_probs"], length).requires_grad_()
    loss, _ = ppo_utils.ppo_policy_loss(
        log_probs, padded(given["old_log_probs"], length), normalised(data, algorithm), algorithm, loss_mask=mask
    )
    loss.backward()
    assert log_probs.grad is not None
    found: list[list[float]] = log_probs.grad.tolist()
    return found


def main() -> None:
    options = states.parser().parse_args()
    skyrl_on_cpu.install()
    given: dict[str, Any] = {"values": rows(0.3, 1), "log_probs": rows(-1.0, 2), "old_log_probs": rows(-1.0, 3)}
    constants = {"groups": GROUPS, "rewards": REWARDS, "gamma": GAMMA, "lambda": LAMBDA, "clip": CLIP}
    states.report(
        "skyrl-advantage-padding",
        lambda: {
            "given": given | constants | {"on padding": ON_PADDING},
            **{
                f"{estimator}, {length}": gradient(estimator, length, given)
                for estimator in ESTIMATORS
                for length in LENGTHS
            },
        },
        options.out,
    )
