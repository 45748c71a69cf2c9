"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any

from . import grpo_loss_scale


def part_of_a_window(self: Any) -> float | bool | None:
    """The factor of GRPOTrainer's gradient; None in evaluation, or with a user's own code."""
    if self.loss_type not in ("dapo", "cispo", "fipo"):
        return False
    if self.model_accepts_loss_kwargs or self.compute_loss_func is not None:
        return False
    # The last window of an epoch may be shorter.
    steps = getattr(self, "current_gradient_accumulation_steps", self.args.gradient_accumulation_steps)
    if steps == 1:
        return False
    return float(1 / steps) if self.model.training and not grpo_loss_scale.replaced(self) else None


def another_loss(self: Any) -> bool | None:
    """False for the sigmoid loss; otherwise None: the repair itself reports what it decides."""
    return False if self.args.loss_type == "sigmoid" else None
