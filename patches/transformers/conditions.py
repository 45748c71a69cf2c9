"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def averaged_over_ranks(self: Any) -> bool:
    """Of Trainer: whether several ranks average over their tokens."""
    return bool(self.args.world_size > 1 and self.args.average_tokens_across_devices)


def routers_of_ranks(self: Any) -> float | bool | None:
    """Of Trainer: how many times the routers' loss counts; None while it evaluates, where it counts once."""
    config = getattr(self.model, "config", None)
    if not getattr(config, "output_router_logits", False) or not averaged_over_ranks(self):
        return False
    return float(self.args.world_size) if self.model.training else None


def alone(self: Any) -> bool | None:
    """Of Trainer: False on one rank without accumulation; else it is for the model."""
    return False if self.args.world_size == 1 == self.args.gradient_accumulation_steps else None


def not_smoothed(self: Any) -> bool | None:
    """Of Trainer: False without label smoothing; else it is for the model's name."""
    return False if self.label_smoother is None else None


def not_packed(attention_mask: Any, position_ids: Any) -> bool | None:
    """Of a batch: False where it says what may be attended to, or has no positions; else the positions would tell."""
    return False if attention_mask is not None or position_ids is None else None
