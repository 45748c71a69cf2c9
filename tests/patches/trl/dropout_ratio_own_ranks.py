"""RLOO and GRPO with dropout where a user's code may change the policy or the ratio: ``--out FOLDER [CASE...]``.

Each case before apply() of trl-dropout-ratio, and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import trl

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.patches.trl.proofs.dropout_ratio_ranks import AHEAD, CASES, GRPO, NAME, TWICE, TWO, Recorded, trained
from rlhf_patches.proving import states


class Loss(trl.RLOOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs)


class Scored(trl.RLOOTrainer):
    """Completions of an earlier policy, as from a replay buffer."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return super()._generate_and_score_completions(inputs)


class Unhashable(trl.RLOOTrainer):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class Rewarded(trl.RLOOTrainer):
    """Another method, which neither computes nor keeps log-probabilities."""

    def _calculate_rewards(self, *args: Any) -> Any:
        return super()._calculate_rewards(*args) * 2


class Engine:
    """In the place of vLLM: it samples by another distribution."""

    def sync_weights(self) -> None:
        """The weights are the trainer's."""

    def generate(self, prompts: Any, num_generations: int = 1, **_: Any) -> Any:
        torch.manual_seed(1)
        tokens = torch.randint(3, 99, (len(prompts), 48)).tolist()
        return prompts, tokens, [[[-4.5]] * 48 for _ in tokens], [[[token] for token in row] for row in tokens]


def of(kind: type) -> Callable[..., Any]:
    def make(*args: Any, **settings: Any) -> Any:
        released, trl.RLOOTrainer = trl.RLOOTrainer, kind
        try:
            return small.rollouts(*args, **settings)
        finally:
            trl.RLOOTrainer = released

    return make


def with_an_engine(corrected: bool, mode: str = "token_truncate") -> Callable[..., Any]:
    def make(*args: Any, **settings: Any) -> Any:
        trainer = small.rollouts(*args, **settings)
        trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, 0, Engine()
        trainer.vllm_importance_sampling_correction, trainer.vllm_importance_sampling_mode = corrected, mode
        return trainer

    return make


def with_an_assigned_loss(*args: Any, **settings: Any) -> Any:
    trainer = small.rollouts(*args, **settings)
    released = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: released(model, inputs)
    return trainer


def with_a_hook(*args: Any, **settings: Any) -> Any:
    """Which could take a step of its own."""
    trainer = small.rollouts(*args, **settings)
    next(each for each in trainer.model.parameters() if each.requires_grad).register_hook(lambda gradient: None)
    return trainer


class AtOnce(torch.optim.SGD):
    """As LOMO, which accelerate calls in backward."""

    def fused_backward(self, *args: Any) -> None:
        raise AssertionError


def with_an_optimizer(*args: Any, **settings: Any) -> Any:
    kind, out, rewards, prompts, model, more = args
    named = [each for each in model.parameters() if each.requires_grad]
    return small.rollouts(
        kind, out, rewards, prompts, model, {**more, "optimizers": (AtOnce(named, lr=0.0), None)}, **settings
    )


def again(trainer: Any, seen: Recorded) -> None:
    """A second train() begins with the completions of the first one, whose steps have changed the policy."""
    trainer.train()
    trainer.train()


def own_loop(trainer: Any, seen: Recorded) -> None:
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    for _, batch in zip(range(2), trainer.get_train_dataloader(), strict=False):
        trainer.training_step(trainer.model, batch, None)
        seen.on_pre_optimizer_step(None, None, None, model=trainer.model)
        trainer.model.zero_grad()


Run = Callable[[Any, Recorded], Any]
HOW: dict[str, tuple[dict[str, Any], Callable[..., Any], Run | None]] = {
    "own loss": ({}, of(Loss), None),
    "own completions": ({}, of(Scored), None),
    "no hash": ({}, of(Unhashable), None),
    "assigned loss": ({}, with_an_assigned_loss, None),
    "hook": ({}, with_a_hook, None),
    "at once": (TWO, with_an_optimizer, None),
    "own loop": ({"num_iterations": 2}, small.rollouts, own_loop),
    "own rewards": ({}, of(Rewarded), None),
    "train() again": ({**TWICE, "max_steps": 1}, small.rollouts, again),
    "engine": ({**GRPO, "epsilon": 10.0}, with_an_engine(True), None),
    "engine, clipped": (GRPO, with_an_engine(True, "sequence_truncate"), None),
    "engine, VESPO": ({**GRPO, "loss_type": "vespo"}, with_an_engine(True), None),
    "engine, not corrected": ({**GRPO, **AHEAD}, with_an_engine(False), None),
}


def of_case(case: str, out: Any) -> dict[str, Any]:
    settings, make, run = HOW[case] if case in HOW else (CASES[case], small.rollouts, None)
    return trained(settings, out, make, **({"run": run} if run else {}))


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*HOW])
    options = parser.parse_args()
    states.report_cases(
        NAME, lambda cases: {case: of_case(case, options.out) for case in cases}, options.cases, options.out
    )
