"""ZeRO-3 trains a parameter on the gradients of its step's micro-batches, even if not all of them use it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import rlhf_patches
from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_NAME = "deepspeed-zero3-rare-parameters"
_CLASS = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"

_reduced: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
"""By optimizer and `ds_id` of a parameter: the last micro-batch of this step with a gradient for it."""
_ever: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
"""By optimizer: the parameters that ever had a gradient; their buffers hold it until the next one."""


def reduced(optimizer: Any, params: Iterable[Any]) -> None:
    """Record that this micro-batch has a gradient for these parameters.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer_Stage3``.
        params: of a bucket.
    """
    last = dict.fromkeys((p.ds_id for p in params), optimizer.micro_step_id)
    _reduced.setdefault(optimizer, {}).update(last)
    _ever.setdefault(optimizer, set()).update(last)


def begun(optimizer: Any) -> None:
    """Record that another step begins."""
    _reduced.pop(optimizer, None)


def complete(optimizer: Any, buffers: Mapping[int, Any], accelerator: Any) -> None:
    """Complete a backward pass for parameters that have no gradient in it.

    In a step's first micro-batch, empty their buffers, and with offload the optimizer's gradients too. In a later
    micro-batch that ends the step, with offload, copy the sums of earlier micro-batches to the optimizer's gradients.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer_Stage3``.
        buffers: for each parameter, by `ds_id`, this rank's part of the sum over micro-batches.
        accelerator: DeepSpeed's.
    """
    now, offload, last = optimizer.micro_step_id, optimizer.offload_optimizer, _reduced.get(optimizer, {})
    if now == 0:
        if len(last) == sum(map(len, optimizer.fp16_groups)):
            rlhf_patches.decided(_NAME, False)
            return
    elif not offload or all(number == now for number in last.values()):
        rlhf_patches.decided(_NAME, False)
        return
    if not last or getattr(optimizer, "zenflow", False) or getattr(optimizer, "swap_optimizer", False):
        return
    if now > 0:
        boundary = optimizer.is_gradient_accumulation_boundary  # a method from 0.19.5 on
        if not (boundary() if callable(boundary) else boundary):
            rlhf_patches.decided(_NAME, False)
            return
    params = (param for group in optimizer.fp16_groups for param in group if param.ds_id in buffers)
    missing = [p for p in params if (p.ds_id not in last if now == 0 else last.get(p.ds_id, now) != now)]
    ever = _ever.get(optimizer, set())
    # Upstream uses zeros for a parameter that was frozen since, if the optimizer is not offloaded.
    rlhf_patches.decided(_NAME, any(p.ds_id in ever and (offload or p.requires_grad) for p in missing))
    stream = optimizer.reduce_and_partition_stream
    if stream is not None and not getattr(accelerator, "resolves_data_dependency", bool)():
        stream.wait_stream(accelerator.current_stream())  # the last step has read the buffers there
    with accelerator.stream(stream):  # upstream waits for the end of this stream next
        for param in missing:
            buffer, param_id = buffers[param.ds_id], optimizer.get_param_id(param)
            if now == 0:
                buffer.zero_()  # writes: removes the gradient of the previous step, which is the repair
            if offload:
                group, offset, _ = optimizer.grad_position[param_id]
                gradient = optimizer.fp32_partitioned_groups_flat[group].grad.narrow(0, offset, buffer.numel())
                gradient.copy_(buffer)  # writes: the same for the optimizer's gradient
            if now > 0:
                there = buffer.to(accelerator.current_device_name())
                # writes: as upstream does for parameters with a gradient in this micro-batch
                optimizer.norm_for_param_grads[param_id] = optimizer._constant_buffered_norm2(there)


def _changes(after: str) -> tuple[Rewrite, ...]:
    """``after``: the prefix of the string in the epilogue's memory report."""
    reported = f'self.report_ipg_memory_usage({after}"In ipg_epilogue after reduce_ipg_grads", 0)'
    return (
        Rewrite(
            target=f"{_CLASS}.partition_grads",
            pattern="buffers = []",
            replacement="buffers = []; $REDUCED(self, params_to_release)",
            alongside=("if self.micro_step_id == 0:\n    $$$",),
            uses={"REDUCED": f"{__name__}:reduced"},
        ),
        Rewrite(
            target=f"{_CLASS}.independent_gradient_partition_epilogue",
            pattern=reported,
            replacement=(
                f"{reported}; type(self) is DeepSpeedZeroOptimizer_Stage3 and "
                "$COMPLETE(self, self.__param_id_to_grad_partition, get_accelerator())"
            ),
            uses={"COMPLETE": f"{__name__}:complete"},
        ),
        *(
            Rewrite(
                target=f"{_CLASS}.{function}",
                pattern="self.micro_step_id = 0",
                replacement="self.micro_step_id = 0; $BEGUN(self)",
                uses={"BEGUN": f"{__name__}:begun"},
            )
            for function in ("_pre_step", "zero_grad")
        ),
    )


PATCH = Patch(
    name=_NAME,
    summary="ZeRO-3 uses only this step's gradients, also for parameters that not every micro-batch uses",
    harm="wrong gradient",
    bug="ZeRO-3 uses gradients of the previous step for parameters that not every micro-batch uses",
    when="ZeRO-3, and a trained parameter that a step, its first micro-batch or (with offload) its last does not use",
    excluded_by=("zero_optimization.stage=absent|0|1|2",),
    symptom="""\
ZeRO-3 trains a parameter that some micro-batches use and others do not: an expert that no token was routed to, a vision
tower in a batch of text alone, an adapter or a head of one of several tasks. No error is raised.

- A step that does not use the parameter trains it again on the gradient of the last step that did.
- A step whose first micro-batch does not use it, while a later one does, adds the gradient of the previous step.
- With `offload_optimizer`, a step whose last micro-batch does not use it loses the gradients of the other
  micro-batches, and trains it on that of the previous step.

The logged gradient norm and clipping are then wrong too, by 19 to 95 % in the tests. With fp16, an infinite gradient
also stays, and overflows repeat, until the parameter is used again (from reading the code, not run).""",
    cause="""\
`partition_grads` sums a parameter's gradients over micro-batches in a buffer. The step's first micro-batch overwrites
the buffer if it has a gradient, and later ones add to it. No code empties the buffer, and `step()` uses all buffers.
With offload, the sum is copied to the optimizer's gradient only in the last micro-batch, and only for parameters that
have a gradient in it. The bug was reproduced in 0.14.5, 0.15.2, 0.18.2, 0.18.5, 0.18.9 and 0.19.8; for the other
releases the code was read. 0.6.0 to 0.9.1 have the same bug in a function of another name. Releases before 0.6.0 use
other buffers.""",
    repair="""\
After the gradients of a step's first micro-batch are reduced, the patch empties the buffers of parameters without a
gradient in this micro-batch, and with offload the optimizer's gradients too. In the last micro-batch it copies the sums
of earlier micro-batches to the optimizer's gradients. A parameter that a step does not use has a gradient of 0, as a
part of a flat tensor: Adam's momentum and weight decay still change it. A gradient that your code sets between
`backward()` and `step()` (`safe_set_full_grad`) counts as before. If every micro-batch uses every parameter, the patch
runs no additional operator, and results are bitwise identical.

The patch does not repair an optimizer on NVMe, ZenFlow, SuperOffload, MiCS and DeepCompile, which keep upstream's code.
It does not repair gradients that are lost if several forward passes precede one backward pass.""",
    changes_numbers="""\
ZeRO-3 used the gradient of an earlier step for parameters that a step, or its first micro-batch, did not use. With an
offloaded optimizer this also happened if the last micro-batch did not use them, and then this step's gradients were
lost. With the patch, rarely used experts, towers and adapters move less, and the gradient norm is that of the step. If
you tuned a run without the patch, check the learning rate of such parameters again. Checkpoints reflect the gradients
they were trained on; training can continue from them.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/pull/1453",
        "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.5/deepspeed/runtime/zero/stage3.py",
    ),
    variants=(
        Variant(Guard("deepspeed", ">=0.9.2,<0.17.5"), _changes("f")),
        Variant(Guard("deepspeed", ">=0.17.5,<=0.19.8"), _changes("")),
    ),
    obsolete_when="when the oldest DeepSpeed in use has the repair",
    conditions=(Condition(f"{_CLASS}.independent_gradient_partition_epilogue"),),
)
