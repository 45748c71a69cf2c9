"""ZeRO-1 and ZeRO-2 with an optimizer on the CPU, and parameters that not every micro-batch uses: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_COPIES = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.copy_grads_in_partition"

ADVICE = Advice(
    name="deepspeed-offload-rare-parameters",
    summary="ZeRO-1 and 2 with an offloaded optimizer train parameters that are not always used on wrong gradients",
    harm="wrong gradient",
    bug="ZeRO-1 and 2 with an offloaded optimizer train parameters that are not always used on wrong gradients",
    when="ZeRO-1 or 2, offload_optimizer, and a parameter that some micro-batches do not use",
    excluded_by=("zero_optimization.stage=absent|0|3", "zero_optimization.offload_optimizer.device=none"),
    symptom="""\
ZeRO-1 or ZeRO-2 with `offload_optimizer` (`"device": "cpu"`), and a parameter that some micro-batches use and others do
not: an expert that no token was routed to, a vision tower beside text alone, an adapter or a head of one of several
tasks. No error.

- A step that does not use it at all trains it again, on the gradient of the last step that did. Neither ZeRO-2 nor
  accumulation is needed, and the norm in the log does not show it.
- ZeRO-2 with accumulation: where the last micro-batch does not use it, the gradient of the others is lost; where the
  first does not, that of the step before is added. The norm in the log, and clipping, are wrong with it: of four
  micro-batches 7.06 where 10.37 is right, and 10.87 where 9.14 is right.""",
    cause="""\
The optimizer's gradient and, for ZeRO-2, the sums between micro-batches lie in buffers on the CPU, which nothing
empties. A parameter's part of the optimizer's is written (`copy_grads_in_partition`) when the last micro-batch has a
gradient for it, and keeps what it had otherwise. Sums are overwritten by the first micro-batch if it has a gradient,
and go on from the last step's otherwise. 0.15.2 to 0.18.9 do not add these, and lose more, which
`deepspeed-offload-accumulation` repairs. Seen in 0.15.2, 0.18.9 and 0.19.8; before 0.15.1 the code is the same, and
does not run beside a torch of today.""",
    what_to_do="""\
If every micro-batch uses every parameter that is trained, nothing: such runs are right. Otherwise let them: add
`sum((0 * p).sum() for p in model.parameters())` to each loss; or offload no optimizer. ZeRO-1 alone does not help. No
release up to 0.19.8 has a repair.

That a run meets it is told on the rank that has the part of such a parameter, one step later: in the log by rank 0
alone, by all ranks with `RLHF_PATCHES_LOG=warning:all`, or in `RLHF_PATCHES_REPORT`. A rank all of whose parameters
were left out by a step does not see it.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/pull/7967",
        "https://github.com/deepspeedai/DeepSpeed/pull/7981",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.5.9,<=0.19.8"),
            (
                Shape(
                    target=_COPIES,
                    pattern="self.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)",
                    alongside=("self.async_accumulate_grad_in_cpu_via_gpu(param)",),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use has it repaired",
    conditions=(Condition(_COPIES, "rlhf_patches.patches.deepspeed._conditions:trained_on_what_was_left"),),
)
