"""An advice for ZeRO-1 and ZeRO-2 with an optimizer on the CPU, and parameters that not every micro-batch uses."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_COPIES = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.copy_grads_in_partition"

ADVICE = Advice(
    name="deepspeed-offload-rare-parameters",
    summary="ZeRO-1 and 2 with an offloaded optimizer use wrong gradients for parameters that are not always used",
    harm="wrong gradient",
    bug="ZeRO-1 and 2 with an offloaded optimizer use wrong gradients for parameters that are not always used",
    when="ZeRO-1 or 2, offload_optimizer, and a parameter that some micro-batches do not use",
    excluded_by=("zero_optimization.stage=absent|0|3", "zero_optimization.offload_optimizer.device=none|absent"),
    symptom="""\
ZeRO-1 or ZeRO-2 with `offload_optimizer` (`"device": "cpu"`) trains a parameter that some micro-batches use and others
do not: an expert that no token was routed to, a vision tower in a batch of text alone, an adapter or a head of one of
several tasks. No error is raised.

- A step that does not use the parameter at all trains it again on the gradient of the last step that did. This needs
  neither ZeRO-2 nor accumulation, and the logged norm does not show it.
- ZeRO-2 with accumulation: if the last micro-batch does not use the parameter, the gradient of the others is lost. If
  the first micro-batch does not use it, the gradient of the previous step is added. The logged norm and clipping are
  then wrong too: with four micro-batches 7.06 instead of 10.37, and 10.87 instead of 9.14.""",
    cause="""\
The optimizer's gradient and, for ZeRO-2, the sums between micro-batches are in buffers on the CPU, which no code
empties. `copy_grads_in_partition` writes a parameter's part of the optimizer's gradient if the last micro-batch has a
gradient for it; otherwise the part keeps its old content. The first micro-batch overwrites a sum if it has a gradient;
otherwise later ones add to the last step's sum. 0.15.2 to 0.18.9 do not add to the last step's sum, and lose more,
which `deepspeed-offload-accumulation` repairs. The bug was reproduced in 0.15.2, 0.18.9 and 0.19.8. Before 0.15.1 the
code is the same, and does not run with a current torch.""",
    what_to_do="""\
If every micro-batch uses every trained parameter, the run is right and needs no change. Otherwise add `sum((0 *
p).sum() for p in model.parameters())` to each loss, or do not offload the optimizer. ZeRO-1 with offload has the bug,
too. No release up to 0.19.8 has a repair.

An affected run is reported one step later, on the rank whose partition of the optimizer has such a parameter. By
default only rank 0 logs it; `RLHF_PATCHES_LOG=warning:all` makes all ranks log it, and `RLHF_PATCHES_REPORT` records
it. A rank does not detect a step that used none of the parameters in its partition.""",
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
    obsolete_when="when the oldest DeepSpeed in use has the repair",
    conditions=(Condition(_COPIES, "rlhf_patches.patches.deepspeed._conditions:trained_on_what_was_left"),),
)
