"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def accumulates(self: Any) -> bool:
    """Of a ZeRO optimizer: whether a step has several micro-batches."""
    return bool(self.gradient_accumulation_steps > 1)


def accumulates_offloaded(self: Any) -> bool:
    """Of a ZeRO optimizer: the same, where its state is on the CPU."""
    return bool(self.cpu_offload and self.gradient_accumulation_steps > 1)


def drops_of_several(k: int, drop_tokens: bool) -> bool:
    """Of ``topkgating``: whether tokens beyond an expert's capacity are dropped, of more than two choices."""
    return bool(k > 2 and drop_tokens)


def has_an_empty_group(client_optimizer: Any) -> bool | None:
    """Of an engine's optimizer: None where it is to be made yet."""
    groups = getattr(client_optimizer, "param_groups", None)
    return None if groups is None else any(not group["params"] for group in groups)
