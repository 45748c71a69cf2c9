"""GRPO's trainer in subclasses that leave truncated completions out of the count themselves: ``--out FOLDER``.

Each before apply() of trl-grpo-truncated-count, and after it.
"""

from __future__ import annotations

from typing import Any

import torch
import trl

from rlhf_patches.patches.trl.proofs import grpo_truncated_count_ranks
from rlhf_patches.proving import states
from tests.patches.trl import own_grpo

CASE = "masked"


def generated(trainer: Any, made: Any) -> Any:
    """The tokens of each completion, truncated ones' too."""
    return (made["completion_ids"] != trainer.processing_class.pad_token_id).sum(-1)


class Counts(trl.GRPOTrainer):
    """The number of tokens."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        truncated = made["completion_mask"].sum(-1) == 0
        out = self.accelerator.gather((generated(self, made) * truncated).sum()).sum()
        made["num_items_in_batch"] = made["num_items_in_batch"] - out
        return made


class Multiplies(trl.GRPOTrainer):
    """The loss."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        self.times = float(generated(self, made).sum() / made["completion_mask"].sum().clamp(min=1))
        return made

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return super()._compute_loss(model, inputs) * self.times


class Generates(trl.GRPOTrainer):
    """The number of tokens, where they are counted: a constant of the user's own."""

    def _generate(self, *given: Any, **options: Any) -> Any:
        made = list(super()._generate(*given, **options))
        count = next(i for i, each in enumerate(made) if isinstance(each, torch.Tensor) and not each.dim())
        made[count] = torch.full_like(made[count], 64)
        return tuple(made)


def main() -> None:
    out = states.parser().parse_args().out

    def observe() -> dict[str, Any]:
        return own_grpo.each((Counts, Multiplies, Generates), lambda: grpo_truncated_count_ranks.trained(CASE, out))

    states.report(grpo_truncated_count_ranks.NAME, observe, out, reverted=False)
