"""The epoch in which verl's trainers continue."""

from __future__ import annotations

from typing import Any

from .._epochs import to_continue


def epoch_to_continue(epoch: int, step: int, loader: Any) -> int:
    """The epoch whose batches the loader yields next, of ``step // len(loader)`` and the one before."""
    return to_continue("verl-resume-epoch", epoch, step, loader)
