"""SkyRL's own `fwd_logprobs_values_reward` of one release over some steps, watched and not: ``--out FOLDER``.

The policy and its engine are two_policies.py's; what stands for SkyRL's workers answers with the trainer's
log-probabilities, at the temperature, which the engine's are not, unless that is 1 (skyrl-rollout-temperature).
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from rlhf_patches.patches.skyrl import _watched_rollouts
from tests.harness import watched
from tests.harness.two_policies import Trained, of
from tests.patches.skyrl.watch_rollouts_cases import CASES

trainer: Any = importlib.import_module("skyrl.train.trainer")

NAME = "skyrl-watch-rollouts"
STEPS, ROWS, LENGTH = 3, 32, 20


class Batch(dict[str, Any]):
    """A batch of rollouts."""

    metadata: ClassVar[dict[str, Any]] = {"response_length": LENGTH}

    def select(self, **which: Any) -> dict[str, Any]:
        return self


class OwnLoop(trainer.RayPPOTrainer):
    """As `FullyAsyncRayPPOTrainer`."""

    async def train(self) -> None: ...


class Workers:
    """The dispatch."""

    def __init__(self, trained: Trained, temperature: float) -> None:
        self.trained, self.temperature = trained, temperature

    def forward(self, model: str, data: Any) -> Any:
        assert model == "policy"
        found = of(self.trained.weights / self.temperature, data["sequences"])
        rows = [{"logprobs": row} for row in found]
        return type("Output", (dict,), {"loss_fn_outputs": rows})(output=found)

    def empty_cache(self, *models: str) -> None: ...


def run(case: dict[str, Any]) -> dict[str, Any]:
    trained = Trained()
    kind = OwnLoop if case.get("own loop") else trainer.RayPPOTrainer
    it = kind.__new__(kind)
    temperature = case.get("temperature", 1.0)
    it.dispatch = Workers(trained, temperature)
    it.ref_model, it.critic_model, it.all_metrics = None, None, {}
    sampling = SimpleNamespace(
        temperature=temperature, top_p=case.get("top_p", 1.0), top_k=-1, min_p=0.0, repetition_penalty=1.0
    )
    algorithm = SimpleNamespace(
        policy_loss_type="regular", use_kl_in_reward=False, off_policy_correction=None, temperature=temperature
    )
    it.cfg = SimpleNamespace(
        generator=SimpleNamespace(sampling_params=sampling),
        trainer=SimpleNamespace(
            algorithm=algorithm,
            recompute_old_logprobs_per_minibatch=False,
            critic=SimpleNamespace(model=SimpleNamespace(path=None)),
        ),
    )
    trainer.loss_fn_outputs_to_tensor = lambda outputs, key: torch.stack([each[key] for each in outputs])
    kept, differences = [], []
    for step in range(1, STEPS + 1):
        it.global_step = step
        tokens, sampled = trained.sample(ROWS, LENGTH)
        mask = torch.ones(ROWS, LENGTH)
        mask[: ROWS // 2, LENGTH // 2 :] = 0
        mask *= not case.get("nothing")
        batch = Batch(
            sequences=tokens,
            attention_mask=torch.ones_like(tokens),
            loss_mask=mask,
            rollout_logprobs=None if case.get("without") else sampled,
        )
        apart = (of(trained.weights / temperature, tokens) - sampled).double().abs()
        differences.append((apart * mask).sum().item() / max(mask.sum().item(), 1))
        found = it.fwd_logprobs_values_reward(batch)
        assert found is batch
        kept.append([found["action_log_probs"].tolist(), str(it.all_metrics)])
        it.all_metrics = {}
        trained.update()
        if case.get("refit", True):
            trained.refit()
    return {"kept": kept, "differences": differences}


def main() -> None:
    watched.report(NAME, _watched_rollouts.FIGURES, run, CASES)


if __name__ == "__main__":
    main()
