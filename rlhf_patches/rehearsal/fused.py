"""Fused loss: the gradient of Liger's loss in TRL's trainers against the gradient of the trainer's own plain loss."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from . import pieces, states, window
from .relation import Relation, Verdict, not_checked

NAME = "fused loss"
_SWITCHES = ("use_liger_kernel", "use_liger_loss")
"""Attributes of TRL's trainers that select the fused loss; the second one before 0.24."""


def used(trainer: Any) -> bool:
    """Whether the trainer selects Liger's loss itself; Liger's kernels within a model are none of these."""
    return any(vars(trainer).get(name) is True for name in _SWITCHES)


def unknown(trainer: Any) -> str:
    """Return why the trainer may have no plain loss; empty if it has one."""
    kind = type(trainer)
    if not pieces.written_in(kind.compute_loss).startswith("trl."):
        return f"{kind.__name__}'s loss is not known to have a plain form"
    return ""


def without(trainer: Any) -> AbstractContextManager[bool]:
    """Select the plain loss within the context."""
    own = vars(trainer)
    return states.zeroed([(own, name) for name in _SWITCHES if own.get(name) is True])


def judge(fused: torch.Tensor, plain: torch.Tensor, noise: float) -> Relation:
    """Compare both gradients of one micro-batch."""
    if torch.equal(fused, plain):
        return not_checked(NAME, "the switch changes no bit: Liger's loss and the plain one share their code")
    size = float(plain.norm()) or 1.0
    apart = float((fused - plain).norm()) / size
    if apart <= window.limit(noise):
        return Relation(NAME, Verdict.HOLDS, f"{apart:.0e}", f"the plain loss (noise {noise:.0e})")
    times = float(fused @ plain) / size**2
    text = f"relative gradient error: Liger's loss is not the plain loss of this trainer (a part of {times:.3f})"
    return Relation(NAME, Verdict.DEVIATES, f"{apart:.2g}", text)
