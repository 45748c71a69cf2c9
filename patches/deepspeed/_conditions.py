"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import weakref
from typing import Any

from . import group_learning_rates


def adds_to_others(self: Any) -> bool:
    """Of a ZeRO optimizer that has reduced a micro-batch's gradients: whether it is ZeRO-2's, and not the first."""
    return bool(self.partition_gradients and not self.cpu_offload and self.micro_step_id > 0)


def loses_micro_batches(self: Any, param: Any = None) -> bool | None:
    """Of a ZeRO optimizer that takes a parameter's gradient: whether one of this step is lost by now.

    That of a micro-batch between the first and the last; without an accumulation in the configuration, of any before
    the last. None for the last of two, which are right if both use every parameter, and for ZenFlow.
    """
    if not self.cpu_offload:
        return False
    if getattr(self, "zenflow", False):
        return None
    number, accumulates = self.micro_step_id, self.gradient_accumulation_steps > 1
    if not self.partition_gradients:  # ZeRO-1
        return False
    if not self.is_gradient_accumulation_boundary:
        return bool(number > 0 or not accumulates)
    if number == 1 and accumulates:
        return None
    return bool(number > 0)


_steps: weakref.WeakKeyDictionary[Any, tuple[Any, set[int], bool | None]] = weakref.WeakKeyDictionary()
"""Of each optimizer: the newest step's norms by parameter, the parameters of those before it, and what was told."""


def trained_on_what_was_left(self: Any) -> bool | None:
    """Of a ZeRO optimizer that takes a parameter's gradient: False without offload, else True or None.

    True where the step before has trained a parameter of this rank that it had no gradient for on an older one, which
    is in the optimizer's buffer yet: who empties the buffers has a right run. That a step loses micro-batches is not
    told.
    """
    if self.cpu_offload is False:
        return False
    if getattr(self, "zenflow", False):
        return None
    norms = self.norm_for_param_grads  # upstream makes another one at the end of each step
    last, ever, told = _steps.get(self, ({}, set(), None))
    if last is not norms:
        told = _trained_on(self, ever.difference(last))
        ever.update(last)
        _steps[self] = norms, ever, told
    return told  # the same in each call of a step, however often one is asked


def _trained_on(optimizer: Any, params: set[int]) -> bool | None:
    if optimizer.overflow:  # the step before trained nothing
        return None
    for param_id in params:
        group, _, offset, size = optimizer.grad_position[param_id]
        gradient = optimizer.single_partition_of_fp32_groups[group].grad
        if gradient is not None and gradient.view(-1).narrow(0, offset, size).any():
            return True
    return None


def drops_by_logits(drop_tokens: bool, drop_policy: str) -> bool:
    """Of ``topkgating``: whether an expert takes those with the largest logits, for any number of choices."""
    return bool(drop_tokens and drop_policy == "probs")


def rates_of_groups(self: Any, optimizer: Any, warmup_max_lr: Any) -> bool | None:
    """Of a scheduler's optimizer: whether its groups have several learning rates.

    None of tensors, and of a user's scheduler or one with a user's function, which may give each group its own.
    """
    if warmup_max_lr is not None:
        return False
    if group_learning_rates.replaced(self):
        return None
    rates = [group["lr"] for group in optimizer.param_groups]
    return len({*rates}) > 1 if all(isinstance(rate, (int, float)) for rate in rates) else None
