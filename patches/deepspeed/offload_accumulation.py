"""ZeRO-2 with an optimizer on the CPU: gradients of all micro-batches, not only of the first and the last."""

from __future__ import annotations

import weakref
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_CLASS = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


_last: weakref.WeakKeyDictionary[Any, tuple[int, set[int]]] = weakref.WeakKeyDictionary()
"""By optimizer: the number of the micro-batch at the last call of `kept`, and the ids kept by then."""


def kept(optimizer: Any) -> set[int]:
    """The ids of parameters whose buffer on the CPU holds gradients of the current step, on this rank.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer``.
    """
    number, found = _last.get(optimizer, (0, set()))
    if optimizer.micro_step_id < number:
        found.clear()  # another step: ZenFlow with `overlap_step` ends its steps in its own `step`
    _last[optimizer] = optimizer.micro_step_id, found
    return found


_KEPT = {"KEPT": f"{__name__}:{kept.__name__}"}

PATCH = Patch(
    name="deepspeed-offload-accumulation",
    summary="ZeRO-2 with an offloaded optimizer accumulates the gradients of every micro-batch",
    harm="wrong gradient",
    bug="ZeRO-2 with an offloaded optimizer drops the gradients of micro-batches",
    when="ZeRO-2, offload_optimizer, and more than one backward() a step",
    excluded_by=("zero_optimization.stage=absent|0|3", "zero_optimization.offload_optimizer.device=none|absent"),
    symptom="""\
ZeRO-2 with `offload_optimizer` (`"device": "cpu"`) trains on a part of the batch, without an error. With
`gradient_accumulation_steps` of 3 or more, only the first and the last micro-batch count. If
`set_gradient_accumulation_boundary()` combines several `backward()` into a step and `gradient_accumulation_steps` is
1, only the last counts. The logged gradient norm is too low, clipping uses that norm, and an overflow in a dropped
micro-batch is not detected. Accumulation over 2 micro-batches is right. ZeRO-1 is right, with one exception: with
ZenFlow (0.17.5 and later) and an `update_interval` of 3 or more, it has the same bug.""",
    cause="""\
ZeRO-2 keeps this rank's part of the gradients between micro-batches in buffers on the CPU. 0.15.2 made the copy to the
buffer an alternative to the addition: the first micro-batch is copied, each later one is added to the buffer's content
on the GPU, and the sum is discarded. `copy_grads_in_partition` does neither unless `gradient_accumulation_steps` is
above 1.""",
    repair="""\
The patch copies the sum back unless the optimizer steps next, as in 0.15.1. It uses the buffers whenever a step has
more than one micro-batch, as in 0.19.0. A step of one micro-batch makes no copy, as before. Otherwise each micro-batch
but the last makes one.

The patch differs from 0.19.0 in two ways. It does not copy in the last micro-batch of a step, because ZeRO-1 before
0.16.5 would add the copy in the next step. And it uses a buffer only in the step that filled it: 0.19.0 to 0.19.8 add
the last step's gradients of a parameter that the first micro-batch does not use. With the patch, ZenFlow's gradients
equal their definition (seen in 0.18.9).

Not repaired, as in 0.19.8: if the last micro-batch does not use a parameter, the parameter's accumulated gradient is
lost.

A micro-batch that `zero_grad()` is meant to drop counts with the patch, as without offload: `zero_grad()` does not
empty DeepSpeed's own sums. If you have replaced a function of the optimizer so that it adds the lost micro-batches,
remove your code: the patch does not detect it, and they would count twice.""",
    changes_numbers="""\
Since DeepSpeed 0.15.2, ZeRO-2 with an offloaded optimizer and accumulation over N micro-batches, N of 3 or more,
trained on the first and the last of them, divided by N: the gradient had about 2/N of its size and was noisier. This
includes ZenFlow with an `update_interval` of N, with ZeRO-1 too; the parameters that ZenFlow selects are trained in
each micro-batch and were right. With the patch, gradient norms rise (by a factor of N / 2 if the micro-batches agree)
to what a run without offload logs. If you tuned a run without the patch, check its learning rate and its clipping
threshold again. The factor affects SGD and clipping. Adam is affected mostly by the noise. Checkpoints reflect the
gradients they were trained on; training can continue from them.""",
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
