"""ZeRO-2 with an optimizer on the CPU, and parameters that not every micro-batch uses: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, Guard, Shape, Variant

ADVICE = Advice(
    name="deepspeed-offload-rare-parameters",
    summary="ZeRO-2 with an offloaded optimizer gives parameters that some micro-batches do not use a wrong gradient",
    symptom="""\
ZeRO-2 with `offload_optimizer` (`"device": "cpu"`) and gradient accumulation, and a parameter that some micro-batches
of a step use and others do not: an expert that no token was routed to, a vision tower beside text alone, an adapter or
a head of one of several tasks. Its gradient is wrong, and so are the norm in the log and everything that is clipped by
it. No error. Of four micro-batches, where the last one did not use the parameter, the norm was 7.06 where 10.37 is
right; where the first one did not, 10.87 where 9.14 is right. ZeRO-1 with the same offload is right.""",
    cause="""\
Between micro-batches the gradients lie in buffers on the CPU. What was accumulated is handed to the optimizer by
`copy_grads_in_partition`, which runs for a parameter when the last micro-batch has a gradient for it: if it has none,
all that the others gave is lost. And a buffer is not emptied after a step: what it holds is added in the next one,
unless the first micro-batch uses the parameter and overwrites it. 0.15.2 to 0.18.9 do not add it, and lose more, which
`deepspeed-offload-accumulation` repairs. Seen in 0.15.1, 0.15.2, 0.18.9, 0.19.0 and 0.19.8; before 0.15.1 the code is
the same, and does not run beside a torch of today.""",
    what_to_do="""\
If every micro-batch uses every parameter that is trained, nothing: such runs are right. Otherwise set `"stage": 1` and
keep the offload, which costs memory for the gradients, or offload no optimizer. Or let every micro-batch use them all:
add `sum((0 * p).sum() for p in model.parameters())` to each loss. No release up to 0.19.8 has a repair.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/pull/7967",
        "https://github.com/deepspeedai/DeepSpeed/pull/7981",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.5.9,<=0.19.8"),
            (
                Shape(
                    target="deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.copy_grads_in_partition",
                    pattern="self.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)",
                    alongside=("self.async_accumulate_grad_in_cpu_via_gpu(param)",),
                ),
            ),
        ),
    ),
    retire="when the oldest DeepSpeed in use has it repaired",
)
