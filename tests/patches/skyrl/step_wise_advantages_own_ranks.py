"""The proof's worker of skyrl-step-wise-advantages with other estimators, batches and a user's own functions."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from rlhf_patches.patches.skyrl.proofs import step_wise_advantages_ranks as worker

released = worker.advantages


def own(token_level_rewards: Any, response_mask: Any, **_: Any) -> Any:
    """A user's estimator, whose advantages differ between tokens."""
    found = token_level_rewards.sum(-1, keepdim=True) * response_mask.cumsum(-1)
    return found, found


@contextlib.contextmanager
def registered(name: str) -> Iterator[None]:
    registry: Any = importlib.import_module(worker.UTILS).AdvantageEstimatorRegistry
    with mock.patch.dict(registry._functions, {name: own}):
        yield


def without_last_step() -> tuple[list[Any], float]:
    """The error of a batch whose last sample is not a last step."""
    trainer = worker.modules.trainer().RayPPOTrainer
    convert = trainer.convert_to_training_input

    def cut(*given: Any) -> Any:
        batch = convert(*given)
        batch["is_last_step"][-1] = False
        return batch

    with mock.patch.object(trainer, "convert_to_training_input", cut):
        try:
            return released("grpo")
        except (AssertionError, IndexError) as error:
            return [type(error).__name__], 0.0


def advantages(estimator: str, *more: Any) -> tuple[list[Any], float]:
    if estimator == "no last step":
        return without_last_step()
    if not estimator.startswith("own"):
        return released(estimator, *more)
    name = estimator.removeprefix("own as ")
    worker.modules.trainer()
    with registered(name):
        return released(name, *more)


CASES = {
    "grpo": ("grpo",),
    "rloo": ("rloo",),
    "grpo, padded": ("grpo", True, 5),
    "not step-wise": ("grpo", False),
    "shorter steps": ("grpo", True, 1, ((2, 7), (3,), (4, 5), (2, 2))),
    "gae": ("gae",),
    "reinforce++": ("reinforce++",),
    "no last step": ("no last step",),
    "own": ("own as mine",),
    "own as grpo": ("own as grpo",),
}


def main() -> None:
    with mock.patch.object(worker, "advantages", advantages):
        worker.main(CASES)
