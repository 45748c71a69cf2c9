"""ZeRO-2 with an optimizer on the CPU: gradients of all micro-batches, not of the first and the last."""

from __future__ import annotations

import weakref
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_CLASS = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


_last: weakref.WeakKeyDictionary[Any, tuple[int, set[int]]] = weakref.WeakKeyDictionary()
"""Of each optimizer: the number of the micro-batch when it was last asked about, and what was kept by then."""


def kept(optimizer: Any) -> set[int]:
    """The ids of parameters whose buffer on the CPU holds gradients of the step in progress, on this rank.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer``.
    """
    number, found = _last.get(optimizer, (0, set()))
    if optimizer.micro_step_id < number:
        found.clear()  # another step: ZenFlow with `overlap_step` ends its own in a `step` of its own
    _last[optimizer] = optimizer.micro_step_id, found
    return found


_KEPT = {"KEPT": f"{__name__}:{kept.__name__}"}

PATCH = Patch(
    name="deepspeed-offload-accumulation",
    summary="ZeRO-2 with an offloaded optimizer accumulates the gradients of every micro-batch",
    harm="wrong gradient",
    bug="ZeRO-2 with an offloaded optimizer drops the gradients of micro-batches",
    when="ZeRO-2, offload_optimizer, and more than one backward() a step",
    excluded_by=("zero_optimization.stage=absent|0|3", "zero_optimization.offload_optimizer.device=none"),
    symptom="""\
ZeRO-2 with `offload_optimizer` (`"device": "cpu"`) trains on a part of the batch, in silence. With
`gradient_accumulation_steps` of 3 or more only the first and the last micro-batch count; where several `backward()`
make a step by `set_gradient_accumulation_boundary()` and `gradient_accumulation_steps` is 1, only the last. The
gradient norm in the log is too low, clipping clips by that norm, and an overflow in a micro-batch between is not
noticed. An accumulation of 2 is right, and so is ZeRO-1 but for ZenFlow (0.17.5 and later), which does with an
`update_interval` of 3 or more as ZeRO-2 does.""",
    cause="""\
ZeRO-2 keeps this rank's part of the gradients between micro-batches in buffers on the CPU. 0.15.2 made copying there
the alternative to adding what is there: the first micro-batch is copied, each later one is added to it on the GPU, and
the sum is thrown away. `copy_grads_in_partition` does not even ask for either unless `gradient_accumulation_steps` is
above 1.""",
    repair="""\
What was added up is copied back unless the optimizer steps next, as in 0.15.1; and the buffers are used wherever there
was a micro-batch before or will be another, as in 0.19.0. A step of one micro-batch makes no copy, as before; otherwise
each micro-batch but the last makes one. Two things are not as in 0.19.0. Nothing is copied before the optimizer steps,
because before 0.16.5 ZeRO-1 would add it in the next step. And a buffer counts only for the step that filled it: 0.19.0
to 0.19.8 add the last step's gradients of a parameter that the first micro-batch does not use. ZenFlow's gradients are
those of the definition with it (seen in 0.18.9).

Not repaired, as in 0.19.8: what a parameter has accumulated is lost where the last micro-batch does not use it.""",
    changes_numbers="""\
Since DeepSpeed 0.15.2, ZeRO-2 with an offloaded optimizer and an accumulation of N micro-batches, 3 or more (ZenFlow,
of ZeRO-1 too: an `update_interval` of N; what it selects is trained in each micro-batch and was right), trained on the
first and the last of them, divided by N: the gradient was as if of 2 N-ths of its size and of noisier batches. With the
patch gradient norms rise (by a factor of N / 2 where micro-batches agree) to what a run without offload logs. A run
that was tuned with it should have its learning rate and its clipping threshold looked at again; SGD and clipping see
the factor, Adam mostly the noise. A checkpoint is as good as what it was trained on, and can be trained on.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/pull/7967",
        "https://github.com/deepspeedai/DeepSpeed/pull/7981",
        "https://github.com/deepspeedai/DeepSpeed/pull/6550",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.15.2,<0.19.0"),
            (
                Rewrite(
                    target=f"{_CLASS}.async_accumulate_grad_in_cpu_via_gpu",
                    pattern=(
                        "if self.micro_step_id > 0:\n    accumulate_gradients()\nelse:\n    copy_gradients_to_cpu()"
                    ),
                    replacement=(
                        "if self.micro_step_id > 0 and param_id in $KEPT(self):\n    accumulate_gradients()\n"
                        "if not self.is_gradient_accumulation_boundary:\n"
                        "    copy_gradients_to_cpu(); $KEPT(self).add(param_id)"
                    ),
                    uses=_KEPT,
                ),
                Rewrite(
                    target=f"{_CLASS}.copy_grads_in_partition",
                    pattern="self.gradient_accumulation_steps > 1",
                    inside=(
                        "if self.gradient_accumulation_steps > 1:\n    self.async_accumulate_grad_in_cpu_via_gpu(param)"
                    ),
                    replacement="self.micro_step_id > 0 or not self.is_gradient_accumulation_boundary",
                ),
                Rewrite(
                    target=f"{_CLASS}.step",
                    pattern="self.micro_step_id = INITIAL_MICRO_STEP_ID",
                    replacement="self.micro_step_id = INITIAL_MICRO_STEP_ID; $KEPT(self).clear()",
                    uses=_KEPT,
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.0",
    conditions=(
        Condition(
            f"{_CLASS}.copy_grads_in_partition",
            f"{__package__}._conditions:loses_micro_batches",
        ),
    ),
)
