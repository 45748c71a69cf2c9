"""GRPO's trainer in subclasses that have repaired the size of the loss themselves: ``--out FOLDER``.

Each before apply() of trl-grpo-dapo-scale, and after it.
"""

from __future__ import annotations

from typing import Any

import torch
import trl

from rlhf_patches.patches.trl.proofs import grpo_dapo_scale_ranks
from rlhf_patches.proving import states
from tests.patches.trl import own_grpo

CASE = "4 and 2"


class Multiplies(trl.GRPOTrainer):
    """The loss."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        if not model.training:
            return loss
        steps = getattr(self, "current_gradient_accumulation_steps", self.args.steps_per_generation)
        return loss * (self.args.steps_per_generation / steps)


class Counts(trl.GRPOTrainer):
    """The number of tokens."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        part = self.args.gradient_accumulation_steps / self.args.steps_per_generation
        made["num_items_in_batch"] = made["num_items_in_batch"] * (part if self.model.training else 1)
        return made


class Prepares(trl.GRPOTrainer):
    """The number of tokens, in each micro-batch that has not got it yet."""

    def _prepare_inputs(self, given: Any) -> Any:
        inputs = super()._prepare_inputs(given)
        if self.model.training and not inputs.get("scaled"):
            part = self.args.gradient_accumulation_steps / self.args.steps_per_generation
            inputs["num_items_in_batch"], inputs["scaled"] = inputs["num_items_in_batch"] * part, True
        return inputs


class Generates(trl.GRPOTrainer):
    """The number of tokens, where they are counted."""

    def _generate(self, *given: Any, **options: Any) -> Any:
        made = list(super()._generate(*given, **options))
        count = next(i for i, each in enumerate(made) if isinstance(each, torch.Tensor) and not each.dim())
        part = self.args.gradient_accumulation_steps / self.args.steps_per_generation
        made[count] = made[count] * (part if self.model.training else 1)
        return tuple(made)


def main() -> None:
    out = states.parser().parse_args().out

    def observe() -> dict[str, Any]:
        return own_grpo.each(
            (Multiplies, Counts, Prepares, Generates), lambda: grpo_dapo_scale_ranks.trained(CASE, out)
        )

    states.report(grpo_dapo_scale_ranks.NAME, observe, out, reverted=False)
