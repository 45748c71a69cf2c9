"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any

from . import group_learning_rates


def adds_to_others(self: Any) -> bool:
    """Of a ZeRO optimizer that has reduced a micro-batch's gradients: whether it is ZeRO-2's, and not the first."""
    return bool(self.partition_gradients and not self.cpu_offload and self.micro_step_id > 0)


def loses_micro_batches(self: Any) -> bool | None:
    """Of a ZeRO optimizer that begins its step: whether there was a micro-batch between the first and the last.

    Without an accumulation in the configuration, whether there was one before the last. None for two, which are right
    if both use every parameter, and for ZenFlow.
    """
    if not self.cpu_offload:
        return False
    if getattr(self, "zenflow", False):
        return None
    if not self.partition_gradients or self.micro_step_id < 1:  # ZeRO-1, or a step of one
        return False
    return True if self.micro_step_id > 1 or self.gradient_accumulation_steps == 1 else None


def never_without_offload(self: Any) -> bool | None:
    """Of a ZeRO optimizer that takes a parameter's gradient: False without offload, else None.

    Whether a micro-batch has used every parameter is not told by those that it has used.
    """
    return False if self.cpu_offload is False else None


def drops_by_logits(drop_tokens: bool, drop_policy: str) -> bool:
    """Of ``topkgating``: whether an expert takes those with the largest logits, for any number of choices."""
    return bool(drop_tokens and drop_policy == "probs")


def rates_of_groups(self: Any, optimizer: Any, warmup_max_lr: Any) -> bool | None:
    """Of a scheduler's optimizer: whether its groups have several learning rates.

    None of tensors, and of a user's scheduler or one with a user's function, which may give each group its own.
    """
    if warmup_max_lr is not None:
        return False
    # known: only a class that is defined there has such a name; what derives from it elsewhere is a user's.
    if not type(self).__module__.startswith("deepspeed.") or group_learning_rates.replaced(self):
        return None
    rates = [group["lr"] for group in optimizer.param_groups]
    return len({*rates}) > 1 if all(isinstance(rate, (int, float)) for rate in rates) else None
