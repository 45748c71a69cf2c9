"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any

_COUNTED = ("dapo", "cispo", "vespo")
"""Losses that are divided by the tokens of a generation."""


def part_of_a_generation(self: Any) -> float | bool:
    """Of GRPOTrainer: how many times its size the gradient is, where a generation is no step's batch."""
    if self.loss_type not in _COUNTED:
        return False
    size = float(self.args.gradient_accumulation_steps / self.args.steps_per_generation)
    return size if size != 1 else False


def masks_truncated(self: Any) -> bool:
    """Of GRPOTrainer: whether truncated completions are masked, and counted."""
    return bool(self.mask_truncated_completions and self.loss_type in _COUNTED)


def has_tools(inputs: Any) -> bool:
    """Of a batch: whether it says which tokens are of tools."""
    return "tool_mask" in inputs


def micro_batches(self: Any) -> float | bool:
    """Of Online DPO: how many times its size the gradient is."""
    steps = self.args.gradient_accumulation_steps
    return False if steps == 1 or self.is_deepspeed_enabled else float(steps)
