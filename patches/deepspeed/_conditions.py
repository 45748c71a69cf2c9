"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from .. import _float32_buffers
from . import group_learning_rates, zero1_last_micro_batch


def adds_to_others(self: Any) -> bool:
    """Whether a ZeRO optimizer is ZeRO-2's, and has reduced a micro-batch that is not the first."""
    return bool(self.partition_gradients and not self.cpu_offload and self.micro_step_id > 0)


def loses_micro_batches(self: Any, param: Any = None) -> bool | None:
    """Whether a ZeRO optimizer that takes a parameter's gradient has lost a micro-batch of this step.

    ZeRO-2 loses the micro-batches between the first and the last one. If the configuration has no accumulation, it
    loses every micro-batch before the last one. None for the last of two micro-batches, which is right if both use
    every parameter, and for ZenFlow.
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
    # Without accumulation the earlier ones may have been at a boundary too, where no release adds them.
    if number > 0 and (number == 1 or not accumulates):
        return None
    return bool(number > 0)


_steps: weakref.WeakKeyDictionary[Any, tuple[Any, set[int], bool | None]] = weakref.WeakKeyDictionary()
"""By optimizer: the newest step's norms by parameter, earlier steps' parameters, and the last result."""
_still: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
"""By optimizer: the groups that had the learning rate 0 in the newest step."""


def trained_on_what_was_left(self: Any) -> bool | None:
    """Whether the previous step trained a parameter on the gradient of an older step; False without offload.

    True if the previous step had no gradient for a parameter of this rank, and the optimizer's buffer still holds an
    older one. A run that empties the buffers itself is right. None otherwise: lost micro-batches are not detected.
    """
    if self.cpu_offload is False:
        return False
    if getattr(self, "zenflow", False):
        return None
    norms = self.norm_for_param_grads  # upstream makes a new dictionary at the end of each step
    last, ever, trained_on = _steps.get(self, ({}, set(), None))
    if last is not norms:
        trained_on = _trained_on(self, ever.difference(last))
        ever.update(last)
        _steps[self] = norms, ever, trained_on
        _still[self] = set()
    _still[self] |= _without_rate(self)
    return trained_on  # the same result in each call of a step


def _without_rate(optimizer: Any) -> set[int]:
    """The groups that a step does not move."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return {index for index, rate in enumerate(rates) if isinstance(rate, (int, float)) and rate == 0}


def _trained_on(optimizer: Any, params: set[int]) -> bool | None:
    if optimizer.overflow:  # the previous step trained nothing
        return None
    # A learning rate may be set before backward() or after it, and for the next step already.
    still = _still.get(optimizer, set()) | _without_rate(optimizer)
    for param_id in params:
        group, _, offset, size = optimizer.grad_position[param_id]
        if group in still:
            continue
        gradient = optimizer.single_partition_of_fp32_groups[group].grad
        if gradient is not None and gradient.view(-1).narrow(0, offset, size).any():
            return True
    return None


def drops_by_logits(drop_tokens: bool, drop_policy: str) -> bool | None:
    """False if no expert of ``topkgating`` keeps the tokens with the largest logits, for any k.

    Otherwise None: the logits decide. With many experts those that a token chooses are above 0, and nothing is wrong.
    """
    return None if drop_tokens and drop_policy == "probs" else False


def rates_of_groups(self: Any, optimizer: Any, warmup_max_lr: Any) -> bool | None:
    """Whether the parameter groups of a scheduler's optimizer have several learning rates.

    None if the learning rates are tensors, and for a user's scheduler or one with a user's function, which may give
    each group its own learning rate.
    """
    if warmup_max_lr is not None:
        return False
    if group_learning_rates.replaced(self):
        return None
    rates = [group["lr"] for group in optimizer.param_groups]
    return len({*rates}) > 1 if all(isinstance(rate, (int, float)) for rate in rates) else None


def reduces_before_it_adds(self: Any) -> bool | None:
    """Whether an engine reduces over several ranks, and adds the last micro-batch's gradients only afterwards.

    None with DeepCompile, and if a user's function reduces, which may add them first.
    """
    try:
        if not _is_a(self.optimizer, "bf16_optimizer", "BF16_Optimizer"):
            return False
        if not _reduces(self) or self.optimizer.immediate_grad_update or not self.is_gradient_accumulation_boundary():
            return False
        if max(self.optimizer.partition_count, default=1) == 1:
            return False
        own = self.allreduce_gradients is not None and not zero1_last_micro_batch.replaced(self)
        return True if own and not self.is_deepcompile_active() else None
    except AttributeError:  # such as that of an optimizer without parameters
        return None


def counts_several_times(self: Any, scale_wrt_gas: bool) -> float | bool | None:
    """The factor of a micro-batch whose loss is not divided by the accumulation steps; None with DeepCompile."""
    try:
        asked = self.scale_wrt_gas
        steps = self.gradient_accumulation_steps()
        if not (scale_wrt_gas if asked is None else asked) or steps == 1 or _reduces(self):
            return False
        # 0.16.6 and later, before and since 0.18.0
        compiled = getattr(self, "is_deepcompile_active", None) or getattr(self, "is_deepcompile_enabled", None)
        return None if compiled is not None and compiled() else float(steps)
    except AttributeError:
        return None


def divided_again(self: Any, grad: Any) -> float | bool | None:
    """The factor of a pipeline stage's gradient, which each later stage has divided by the accumulation steps."""
    if grad is None or not getattr(self, "_scale_wrt_gas", True):
        return False
    if not _is_a(self, "pipe.engine", "PipelineEngine"):
        return False
    try:
        steps, later = self.gradient_accumulation_steps(), self.num_stages - 1 - self.stage_id
    except AttributeError:
        return None
    return False if steps == 1 or later == 0 else float(steps**-later)


def rounds_frequencies(self: Any, model: Any) -> bool | None:
    """Whether an engine that takes a model casts its rotary frequencies, and whose they are."""
    return _float32_buffers.is_lossy(model) if self.fp16_enabled() or self.bfloat16_enabled() else False


def _reduces(engine: Any) -> bool:
    return bool(engine.enable_backward_allreduce and not engine.inside_no_sync_ctxt)


def _is_a(thing: Any, module: str, name: str) -> bool:
    """Whether something is of a class of DeepSpeed's; nothing is if its module is not loaded."""
    kind = getattr(sys.modules.get(f"deepspeed.runtime.{module}"), name, None)
    return kind is not None and isinstance(thing, kind)
