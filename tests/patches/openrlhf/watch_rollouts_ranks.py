"""OpenRLHF's own `RemoteExperienceMaker` of one release over some steps, watched and not: ``--out FOLDER`` on one rank.

The policy and its engine are two_policies.py's. What stands for Ray hands things on in this process; the actor group
answers `forward` with the trainer's log-probabilities.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.openrlhf import _watched_rollouts
from tests.harness import absent_packages, slime_clone, watched
from tests.harness.two_policies import Trained
from tests.patches.openrlhf.watch_rollouts_cases import CASES

absent_packages.install(("vllm",))
slime_clone.install("torchdata")
maker: Any = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")

NAME = "openrlhf-watch-rollouts"
STEPS, PARTS, ROWS, LENGTH = 3, 2, 16, 20
GROUPED = importlib.util.find_spec("openrlhf.trainer.ppo_utils.experience") is not None
"""Whether settings are in groups."""


def settings(asynchronous: bool = False, at_once: int = ROWS, top_p: float = 1.0) -> SimpleNamespace:
    """As `train_ppo_ray` has them."""
    if GROUPED:
        return SimpleNamespace(
            train=SimpleNamespace(
                async_enable=asynchronous, colocate_all=False, colocate_actor_ref=False, colocate_critic_reward=False
            ),
            rollout=SimpleNamespace(vllm_generate_batch_size=at_once, batch_size=ROWS, top_p=top_p),
            ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
            algo=SimpleNamespace(
                advantage=SimpleNamespace(estimator="reinforce"), kl=SimpleNamespace(use_loss=False, estimator="k1")
            ),
        )
    return SimpleNamespace(
        async_train=asynchronous,
        vllm_generate_batch_size=at_once,
        rollout_batch_size=ROWS,
        top_p=top_p,
        advantage_estimator="reinforce",
        colocate_all_models=False,
        colocate_actor_ref=False,
        colocate_critic_reward=False,
        ring_attn_size=1,
        ds_tensor_parallel_size=1,
        use_kl_loss=False,
        kl_estimator="k1",
    )


class Actors:
    """The actor group."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def async_run_method_batch(self, method_name: str, sequences: list[torch.Tensor], **more: Any) -> Any:
        assert method_name == "forward"
        return [[self.trained.log_probabilities(each)] for each in sequences]


def run(case: dict[str, Any]) -> dict[str, Any]:
    maker.ray = SimpleNamespace(get=lambda given: given, put=lambda given: given)
    trained = Trained()
    own = {name.replace(" ", "_").replace("-", "_"): value for name, value in case.get("settings", {}).items()}
    made = object.__new__(maker.RemoteExperienceMaker)
    made.strategy = SimpleNamespace(args=settings(**own))
    made.actor_model_group = Actors(trained)
    made.critic_model_group = made.initial_model_group = made.reward_model_group = made.remote_rm_url = None
    differences, kept = [], []
    for _ in range(STEPS):
        rollouts, total, count = [], 0.0, 0
        for _ in range(PARTS):
            tokens, sampled = trained.sample(ROWS, LENGTH)
            mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
            mask[: ROWS // 2, LENGTH // 2 :] = 0  # what an environment has said
            apart = (trained.log_probabilities(tokens) - sampled).double().abs()
            total, count = total + (apart * mask).sum().item(), count + mask.sum().item()
            rollouts.append(
                maker.Experience(
                    sequences=tokens,
                    attention_mask=torch.ones_like(tokens),
                    action_mask=mask,
                    rollout_log_probs=None if case.get("without") else sampled.masked_fill(mask == 0, 0.0),
                    rewards=torch.zeros(ROWS),
                    info={"reward": torch.zeros(ROWS)},
                )
            )
        differences.append(total / count)
        found = made.make_experience(rollouts)
        assert all(each is given for each, given in zip(found, rollouts, strict=True))
        kept += [
            {name: value.tolist() for name, value in vars(each).items() if isinstance(value, torch.Tensor)}
            for each in found
        ]
        trained.update()
        if case.get("refit", True):
            trained.refit()
    return {"kept": kept, "differences": differences}


def main() -> None:
    watched.report(NAME, _watched_rollouts.FIGURES, run, CASES)


if __name__ == "__main__":
    main()
