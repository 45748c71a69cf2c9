"""The worker of trl-gkd-generated-count's proof with a trainer that counts generated tokens itself."""

from __future__ import annotations

from typing import Any

from trl.experimental.gkd import GKDTrainer

from rlhf_patches.patches.trl.proofs import gkd_generated_count_ranks as worker


class CountsItself(GKDTrainer):
    """Has repaired the number itself, for steps of one micro-batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if num_items_in_batch is not None:
            num_items_in_batch = (inputs["labels"][:, 1:] != -100).sum()
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Multiplies(GKDTrainer):
    """Multiplies the loss, by a number that it knows."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return found if return_outputs else found * 2


def main() -> None:
    worker.CASES.update(
        {"own": (CountsItself, 1, {}), "own, accumulated": (CountsItself, 2, {}), "multiplied": (Multiplies, 2, {})}
    )
    worker.main()
