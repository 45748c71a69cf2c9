"""Evaluation loss: the loss that evaluation reports for a micro-batch is the micro-batch's own loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from . import window
from .relation import Relation, Verdict

NAME = "evaluation loss"


@contextlib.contextmanager
def mode(model: torch.nn.Module) -> Iterator[None]:
    """Set all modules to evaluation within the context; ``eval()`` of a user's model may change more."""
    kept = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in kept:
            module.training = False
        yield
    finally:
        for module, training in kept:
            module.training = training


def planned(trainer: Any) -> bool:
    """Whether the trainer has a data set to evaluate."""
    return getattr(trainer, "eval_dataset", None) is not None


def loss(trainer: Any, model: torch.nn.Module, inputs: Any) -> float | None:
    """Return the loss of the trainer's ``prediction_step``; None if it has none."""
    made = trainer.prediction_step(model, inputs, prediction_loss_only=True)
    found = made[0] if isinstance(made, tuple) and made else None
    return float(found.detach().double()) if isinstance(found, torch.Tensor) and found.numel() == 1 else None


def judge(found: float, own: float, noise: float) -> Relation:
    """Compare the loss of evaluation with the micro-batch's own loss in the same mode."""
    apart = abs(found - own) / (abs(own) or 1.0)
    if apart <= window.limit(noise):
        return Relation(NAME, Verdict.HOLDS, f"{apart:.0e}")
    text = f"evaluation reports {found:.6g} for a micro-batch whose own loss is {own:.6g}"
    return Relation(NAME, Verdict.DEVIATES, f"{found / own if own else found:.3f} x", text)
