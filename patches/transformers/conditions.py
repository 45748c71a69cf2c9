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
