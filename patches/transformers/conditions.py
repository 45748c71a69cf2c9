"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def averaged_over_ranks(self: Any) -> bool:
    """Of Trainer: whether several ranks average over their tokens."""
    return bool(self.args.world_size > 1 and self.args.average_tokens_across_devices)


def routers_of_ranks(self: Any) -> float | bool | None:
    """Of Trainer: how many times the routers' loss counts; None while it evaluates, where it counts once."""
    config = getattr(self.model, "config", None)
    configs = (config, getattr(config, "text_config", None))
    if not any(getattr(each, "output_router_logits", False) for each in configs) or not averaged_over_ranks(self):
        return False
    return float(self.args.world_size) if self.model.training else None


def alone(self: Any) -> bool | None:
    """Of Trainer: False on one rank without accumulation, by accelerate's own setting too; else it is for the model."""
    steps = max(self.args.gradient_accumulation_steps, self.accelerator.gradient_accumulation_steps)
    return False if self.args.world_size == 1 == steps and self.args.n_gpu <= 1 else None


def not_smoothed(self: Any) -> bool | None:
    """Of Trainer: False without label smoothing; else it is for the model's name."""
    return False if self.label_smoother is None else None


def not_packed(position_ids: Any) -> bool | None:
    """Of a batch: False where it has no positions; else they would tell."""
    return False if position_ids is None else None
