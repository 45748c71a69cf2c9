"""Runs that have a bug of the catalogue, as users have them, whose first window is held against itself."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from hunt import trl_trainer
from hunt.trainers import trl_rollouts
from rlhf_patches.proving import states
from rlhf_patches.rehearsal.relation import Relation
from tests.patches.transformers import rehearsal_ranks as runs

Use = Callable[[Any], None]


class NearItsBase(transformers.Trainer):
    """Has a penalty for what the adapter changes."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        loss = super().compute_loss(model, inputs, *given, **named)
        with torch.no_grad(), model.disable_adapter():
            base = model(**inputs).logits
        penalty = (model(**inputs).logits - base).square().mean()
        return loss + 0.1 * penalty / self.current_gradient_accumulation_steps


def with_a_frozen_half(use: Use) -> None:
    """One half of an adapter is frozen, as LoRA-FA has it."""

    def frozen(trainer: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
        trainer.args.gradient_accumulation_steps = 1
        use(
            NearItsBase(
                trainer.model, trainer.args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator
            )
        )

    runs.build("transformers/llama", frozen, lora=True)


@contextlib.contextmanager
def cut_off() -> Iterator[None]:
    """Meanwhile every other completion of the hunt's has no end, and GRPO masks those."""
    completions, run = trl_rollouts.Rollouts.completions, trl_trainer.run

    def some(self: Any, prompts: Any) -> list[list[int]]:
        return [each[:-1] if place % 2 else each for place, each in enumerate(completions(self, prompts))]

    def masked(*given: Any, **named: Any) -> Any:
        named["options"] = {**named["options"], "mask_truncated_completions": True, "max_completion_length": 5}
        return run(*given, **named)

    trl_rollouts.Rollouts.completions, trl_trainer.run = some, masked  # type: ignore[method-assign]
    try:
        yield
    finally:
        trl_rollouts.Rollouts.completions, trl_trainer.run = completions, run  # type: ignore[method-assign]


def truncated(use: Use) -> None:
    """GRPO of completions that have not all ended."""
    with cut_off():
        runs.build("trl/grpo", use)


def mixed_precision(use: Use) -> None:
    """FSDP2 of a model in bfloat16."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"  # as `accelerate launch` has it; transformers asks for a GPU
    try:
        runs.build("transformers/llama", use, sharding="fsdp2", dtype="bfloat16", ranks=2)
    finally:
        del os.environ["ACCELERATE_MIXED_PRECISION"]


def of_the_hunt(name: str, **settings: Any) -> Callable[[Use], None]:
    return lambda use: runs.build(name, use, **settings)


OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
CASES: dict[str, Callable[[Use], None]] = {
    "two generations in a step": of_the_hunt("trl/grpo", steps_per_generation=2),
    "half of a generation in a step": of_the_hunt("trl/grpo", steps_per_generation=4, accumulation=2),
    "truncated": truncated,
    "online": of_the_hunt("trl/online_dpo"),
    "mixture on two ranks": of_the_hunt("transformers/mixtral", accumulation=1, ranks=2),
    "offloaded": of_the_hunt(
        "transformers/llama", sharding="zero2", deepspeed=OFFLOADED, micro_batch=1, accumulation=4, ranks=2
    ),
    "smoothed and compiled": of_the_hunt("transformers/smoothed", compiled=True),
    "mixed precision": mixed_precision,
    "a frozen half": with_a_frozen_half,
    "a chat": of_the_hunt("trl/dpo-chat"),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+", choices=[*CASES])
    options = parser.parse_args()
    os.chdir(options.out)
    rank = os.environ.get("RANK", "0")
    runs.of_this_process()
    found: dict[str, Any] = {}
    for case in options.cases:
        found[case] = {}
        for patches in runs.PATCHES:
            relations: list[Relation] = []
            with runs.noted(patches) as acted:
                CASES[case](lambda trainer, into=relations: into.extend(runs.rehearsed(trainer)))  # type: ignore[misc]
            found[case][patches] = {"acted": acted, **{each.name: each.as_json() for each in relations}}
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
