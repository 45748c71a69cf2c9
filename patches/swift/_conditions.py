"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import sys
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


def computes_whole_sequences(self: Any) -> bool | None:
    """False without sequence parallelism; otherwise None: the repair itself reports what it repairs."""
    settings = getattr(self.config, "args", self.config)  # which 4.0 and later read
    parallel = settings.sequence_parallel and settings.tensor_model_parallel_size > 1
    return None if parallel else False


def reduces_in_half(args: Any, wrap_with_ddp: bool) -> bool | None:
    """Whether buffers are in half precision although float32 is configured; None with a user's own setting."""
    if not wrap_with_ddp or not (args.bf16 or args.fp16) or not args.accumulate_allreduce_grads_in_fp32:
        return False
    module = sys.modules["swift.megatron.utils.megatron_lm_utils"]
    # known: Megatron's class, by its module; a class of a user's may have another default.
    is_megatrons = module.DistributedDataParallelConfig.__module__.startswith("megatron.core.")
    return True if is_megatrons and not hasattr(args, "grad_reduce_in_fp32") else None
