"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def accumulates(self: Any) -> bool:
    """Of a ZeRO optimizer: whether a step has several micro-batches."""
    return bool(self.gradient_accumulation_steps > 1)


def accumulates_offloaded(self: Any) -> bool:
    """Of a ZeRO optimizer: the same, where its state is on the CPU."""
    return bool(self.cpu_offload and self.gradient_accumulation_steps > 1)


def drops_by_logits(drop_tokens: bool, drop_policy: str) -> bool:
    """Of ``topkgating``: whether an expert takes those with the largest logits, for any number of choices."""
    return bool(drop_tokens and drop_policy == "probs")


def has_an_empty_group(client_optimizer: Any) -> bool | None:
    """Of an engine's optimizer: None where it is to be made yet."""
    groups = getattr(client_optimizer, "param_groups", None)
    return None if groups is None else any(not group["params"] for group in groups)


def rates_of_groups(optimizer: Any, warmup_max_lr: Any) -> bool | None:
    """Of a scheduler's optimizer: whether its groups have several learning rates; None of tensors."""
    if warmup_max_lr is not None:
        return False
    rates = [group["lr"] for group in optimizer.param_groups]
    return len({*rates}) > 1 if all(isinstance(rate, (int, float)) for rate in rates) else None
