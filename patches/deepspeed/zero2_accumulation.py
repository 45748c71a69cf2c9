"""ZeRO-2 accumulates the gradients of all micro-batches of a step, not only of the last one."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="deepspeed-zero2-accumulation",
    summary="ZeRO-2 accumulates the gradients of every micro-batch of a step",
    harm="wrong gradient",
    bug="ZeRO-2 keeps the gradient of the last micro-batch only",
    when="ZeRO-2 without offload, and gradient_accumulation_steps above 1",
    excluded_by=("zero_optimization.stage=absent|0|1|3",),
    symptom="""\
DeepSpeed 0.17.6 to 0.18.2, ZeRO-2 without offload and `gradient_accumulation_steps` of 2 or more, in every precision:
the loss looks right, but the gradient norm is too low (5.1 instead of 11.6 with four micro-batches). ZeRO-1 and ZeRO-3
are right. No error is raised.

The patch does not repair another defect, on CPU ranks only: with `contiguous_gradients: false`, ZeRO-1 and ZeRO-2
before 0.19.8 reduce no gradient at all, because they select gradients by a type that tensors on CPUs do not have.""",
    cause="""\
0.17.6 keeps the accumulated gradients in `all_grad_tensors`, but checks `averaged_gradients` to decide whether there is
anything to add to. `averaged_gradients` is filled at the end of a step, so each micro-batch replaces those before
it.""",
    repair="""\
The patch checks `all_grad_tensors`, as 0.18.3 does. `all_grad_tensors` is emptied at the end of a step, so the next
step starts with its own first micro-batch.

A second `backward` at the boundary before `step()` raises a `TypeError` as without the patch. A `backward` whose
gradients are discarded (`set_gradient_accumulation_boundary(False)`, `backward`, `zero_grad()`) counts with the patch,
since `zero_grad()` does not empty `all_grad_tensors`; without the patch the next `backward` replaces it. If your code
discards gradients so, and each step has one other micro-batch, disable the patch: the bug does not affect such a run
(`RLHF_PATCHES_DISABLE=deepspeed-zero2-accumulation`).""",
    changes_numbers="""\
DeepSpeed 0.17.6 to 0.18.2 trained ZeRO-2 on the last of a step's N micro-batches, divided by N. With the patch,
gradient norms rise (by a factor of N if the micro-batches agree) to what ZeRO-3 and other releases log. If you tuned a
run without the patch, check its learning rate and its clipping threshold again; with Adam, the main effect is less
noise. Checkpoints reflect the gradients they were trained on; training can continue from them.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
        "https://github.com/deepspeedai/DeepSpeed/pull/8382",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.17.6,<0.18.3"),
            (
                Rewrite(
                    target=(
                        "deepspeed.runtime.zero.stage_1_and_2:"
                        "DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue"
                    ),
                    pattern="not i in self.averaged_gradients or self.averaged_gradients[i] is None",
                    replacement="self.all_grad_tensors.get(i) is None and self.averaged_gradients.get(i) is None",
                    alongside=("self.all_grad_tensors[i] = None", "accumulated_grad.add_(new_avg_grad)"),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.18.3",
    conditions=(
        Condition(
            "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue",
            f"{__package__}._conditions:adds_to_others",
        ),
    ),
)
