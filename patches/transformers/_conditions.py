"""The calls in which the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def averaged_over_ranks(self: Any) -> bool:
    """Trainer: whether several ranks average over their tokens."""
    return bool(self.args.world_size > 1 and self.args.average_tokens_across_devices)


def routers_of_ranks(self: Any, inputs: Any) -> bool | None:
    """Trainer: False if no router's loss can count more than once; otherwise the loss decides.

    A batch may request the router's loss instead of the model's config: TRL's does.
    """
    config = getattr(self.model, "config", None)
    configs = (config, getattr(config, "text_config", None))
    asked = isinstance(inputs, Mapping) and inputs.get("output_router_logits") is True
    if not averaged_over_ranks(self) or not (asked or any(getattr(c, "output_router_logits", False) for c in configs)):
        return False
    return None


def alone(self: Any) -> bool | None:
    """Trainer: False on one rank without accumulation, also by accelerate's setting; otherwise the model decides."""
    if self.args.gradient_accumulation_steps > 1:  # asked first: the others take longer
        return None
    steps = max(self.args.gradient_accumulation_steps, self.accelerator.gradient_accumulation_steps)
    return False if self.args.world_size == 1 == steps and self.args.n_gpu <= 1 else None


def not_smoothed(self: Any) -> bool | None:
    """Trainer: False without label smoothing; otherwise the model's name decides."""
    return False if self.label_smoother is None else None


def not_packed(position_ids: Any) -> bool | None:
    """False if a batch has no positions; otherwise the positions decide."""
    return False if position_ids is None else None


def from_a_checkpoint(resume_from_checkpoint: Any) -> bool | None:
    """Trainer: False for a run that does not resume; otherwise the loader decides."""
    return False if resume_from_checkpoint is None else None


def within_an_epoch(self: Any, epoch: int, epochs_trained: int, steps_trained_in_current_epoch: int) -> bool | None:
    """Trainer: False for an epoch of which no batch is skipped; otherwise the loader decides."""
    skips = epoch == epochs_trained and steps_trained_in_current_epoch > 0
    return None if skips and not self.args.ignore_data_skip else False


def not_linear(self: Any) -> bool | None:
    """Decoder layer: False for full attention; otherwise the positions decide."""
    return None if hasattr(self, "linear_attn") else False


def not_mamba(self: Any) -> bool | None:
    """Layer of Bamba, Falcon-H1 or Nemotron-H: False for attention and MLPs; otherwise the positions decide."""
    kind = getattr(self, "block_type", getattr(self, "layer_type", None))
    return None if hasattr(self, "mamba") or kind in ("linear_attention", "mamba") else False


def not_convolution(self: Any) -> bool | None:
    """Decoder layer of LFM2: False for attention; otherwise the positions decide."""
    return None if hasattr(self, "conv") else False
