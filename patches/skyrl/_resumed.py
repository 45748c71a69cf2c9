"""The epoch in which SkyRL's trainer continues."""

from __future__ import annotations

from typing import Any

from .._epochs import to_continue

NAME = "skyrl-resume-epoch"


def epoch_to_continue(trainer: Any, epoch: int) -> int:
    """The epoch whose batches the trainer's loader yields next: ``epoch`` or the one before.

    With dynamic sampling, a step takes several batches: the number of steps does not say how many epochs are over.
    """
    if epoch and trainer.cfg.trainer.algorithm.dynamic_sampling.type is not None:
        return epoch
    step, steps = trainer.global_step, trainer.total_training_steps
    finished = epoch >= trainer.cfg.trainer.epochs or (steps is not None and step >= steps)
    return to_continue(NAME, epoch, step, trainer.train_dataloader, finished=finished)
