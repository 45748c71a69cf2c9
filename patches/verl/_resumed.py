"""The epoch in which verl's trainers continue."""

from __future__ import annotations

from typing import Any

from .._epochs import to_continue


def epoch_to_continue(trainer: Any, epoch: int, step: int, loader: Any) -> int:
    """The epoch whose batches the loader yields next: ``epoch`` or the one before. Called by the trainer's `fit`."""
    steps = getattr(trainer, "total_training_steps", None)
    finished = epoch >= trainer.config.trainer.total_epochs or (steps is not None and step >= steps)
    return to_continue("verl-resume-epoch", epoch, step, loader, finished=finished)
