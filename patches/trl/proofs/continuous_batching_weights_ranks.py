"""Steps of GRPO and RLOO with continuous batching, and the same updates in float64: ``--out FOLDER CASE...``.

Each case before apply() of trl-continuous-batching-weights and after it, the first one after revert() too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
import trl
from transformers.generation import continuous_batching

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-continuous-batching-weights"
RATE = 1e-6
SMALL = {"num_blocks": 16, "max_batch_tokens": 64, "use_async_batching": False}
"""A cache that a CPU makes in no time; the default takes the machine's memory."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {"GRPO": ("GRPO", {}), "RLOO": ("RLOO", {})}
"""The trainer, and settings that differ."""
MIXIN = continuous_batching.ContinuousMixin


class Seen(transformers.TrainerCallback):
    """The gradients before each step of the optimizer."""

    def __init__(self) -> None:
        self.gradients: list[list[Any]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.gradients.append(
            [None if each.grad is None else each.grad.detach().double() for each in more["model"].parameters()]
        )


def paged() -> dict[str, Any]:
    """The setting, by the release's name for it."""
    new = "use_transformers_continuous_batching"
    names = {each.name for each in dataclasses.fields(trl.GRPOConfig)}
    return {new if new in names else "use_transformers_paged": True}


@contextlib.contextmanager
def generating(function: Any) -> Iterator[None]:
    """With another `generate_batch`, for all models of transformers."""
    released = MIXIN.generate_batch
    MIXIN.generate_batch = function(released)
    try:
        yield
    finally:
        MIXIN.generate_batch = released


def with_a_small_cache(released: Any) -> Any:
    """The same with `SMALL`, which TRL cannot be told before 1.7."""

    @functools.wraps(released)
    def generate_batch(self: Any, *arguments: Any, **more: Any) -> Any:
        names = {each.name for each in dataclasses.fields(transformers.ContinuousBatchingConfig)}
        size = "page_size" if "page_size" in names else "block_size"  # its older name
        config = transformers.ContinuousBatchingConfig(**{size: 32, **SMALL})
        return released(self, *arguments, **{**more, "continuous_batching_config": config})

    return generate_batch


def rewards(completions: list[str], **_: Any) -> list[float]:
    """A number of each completion's own."""
    return [hashlib.sha256(each.encode()).digest()[0] / 16 for each in completions]


def made(case: str) -> Any:
    """The trainer of a case."""
    kind, settings = CASES[case]
    policy = settings.get("policy", small.model)()
    return small.rollouts(
        kind,
        pathlib.Path(states.folder()),
        [rewards],
        policy=policy,
        **{
            "max_steps": 2,
            "bf16": True,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "gradient_checkpointing": False,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            **paged(),
            **{name: value for name, value in settings.items() if name != "policy"},
        },
    )


def trained(case: str) -> tuple[Any, list[Any], list[list[Any]]]:
    """The trainer of a case after its steps, the first weights, and the gradients of each step."""
    trainer, seen = made(case), Seen()
    trainer.add_callback(seen)
    start = [each.detach().clone() for each in trainer.model.parameters()]
    trainer.train()
    return trainer, start, seen.gradients


def adam(start: list[Any], gradients: list[list[Any]]) -> list[Any]:
    """Adam's steps in float64: the differences from the start."""
    ways = []
    for place, first in enumerate(start):
        way = torch.zeros_like(first, dtype=torch.float64)
        mean, square = torch.zeros_like(way), torch.zeros_like(way)
        for step, found in enumerate(gradients, 1):
            gradient = found[place]
            if gradient is None:
                continue
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.999 * square + 0.001 * gradient**2
            way -= RATE * (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        ways.append(way.flatten())
    return ways


def observed(case: str) -> dict[str, Any]:
    """How far the weights' way is from that in float64, and what holds them."""
    trainer, start, gradients = trained(case)
    model = trainer.model
    weights = [each.detach() for each in model.parameters()]
    wanted = torch.cat(adam(start, gradients))
    way = torch.cat([(now.double() - first.double()).flatten() for now, first in zip(weights, start, strict=True)])
    # As released, the first generation rounds the weights. These are the updates that are left.
    left = torch.cat(
        [(now.double() - first.to(now.dtype).double()).flatten() for now, first in zip(weights, start, strict=True)]
    )
    moving = wanted != 0
    moments = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
    return {
        "error": float((way - wanted).norm() / wanted.norm()) if bool(moving.any()) else None,
        "stayed": float((left[moving] == 0).double().mean()) if bool(moving.any()) else None,
        "weights": sorted({str(each.dtype) for each in weights}),
        "buffers": sorted({str(each.dtype) for each in model.buffers()}),
        "moments": sorted({str(each.dtype) for each in moments}),
        "found": hashlib.sha256(b"".join(each.double().numpy().tobytes() for each in weights)).hexdigest(),
    }


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    with generating(with_a_small_cache):
        states.report_cases(NAME, lambda cases: {case: observed(case) for case in cases}, options.cases, options.out)
