"""DeepSpeed's pipelines divide a gradient by the accumulation steps once, in the last stage."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant


def divides(engine: Any) -> bool:
    """Whether an engine divides gradients of its outputs; a pipeline stage that gets them from the next one does not.

    Decided by the class: other engines have no stages, and may have a user's attribute named ``is_last_stage``.

    Args:
        engine: a DeepSpeedEngine.
    """
    pipelines: Any = sys.modules.get("deepspeed.runtime.pipe.engine")  # a pipeline's engine has imported it
    return pipelines is None or not isinstance(engine, pipelines.PipelineEngine) or bool(engine.is_last_stage())


_SCALE = "deepspeed.runtime.engine:DeepSpeedEngine._backward_prologue_per_tensor"
_USES = {"DIVIDES": f"{__name__}:{divides.__name__}"}
# 0.19.3 repairs the pipeline's own engine and does not change this function; a new method identifies 0.19.3.
_REPAIRED = ("deepspeed.runtime.engine:DeepSpeedEngine._validate_zero3_moe_compatibility",)

PATCH = Patch(
    name="deepspeed-pipeline-accumulation",
    summary="a pipeline's gradient is divided by the accumulation steps once, not again in each earlier stage",
    harm="wrong gradient",
    bug="each stage of a pipeline divides the gradient by gradient_accumulation_steps again",
    when="a PipelineModule of 2 stages or more, and gradient_accumulation_steps above 1",
    excluded_by=(
        "gradient_accumulation_steps=1",
        "trl=sft|dpo|grpo|kto|reward|rloo|gold",
    ),
    symptom="""\
The bug affects DeepSpeed 0.18.3 to 0.19.2 with a `PipelineModule` of two stages or more and
`gradient_accumulation_steps` of N above 1. The last stage is right. The stage before it has 1/N of its gradient, the
one before that 1/N**2, and so on: 0.250 and 0.0625 with 4 micro-batches. The reported loss is right. Gradient norms are
too low. No error is raised.""",
    cause="""\
Since 0.18.3, the engine divides gradients in a hook on the outputs of its module. For the last stage, this output is
the loss. For an earlier stage, it is the activation for the next stage, and the gradient that comes back has already
been divided by the next stage.""",
    repair="""\
Only the last stage divides, as in 0.19.3. Engines without stages and pipelines of one stage are not affected.

0.18.3 and 0.18.4 can train pipelines only with ZeRO-1, in bfloat16 or float32. Without ZeRO they raise "Direct calls to
tensor.backward() are not supported", with and without the patch.""",
    changes_numbers="""\
From 0.18.3 to 0.19.2, every stage but the last trained on a gradient that was too small by a factor of
`gradient_accumulation_steps` for each stage after it. With the patch, each stage has its full gradient, and the norm
rises. Adam is invariant to such a factor, except for its epsilon, clipping and weight decay. With SGD, earlier stages
have hardly trained. If you tuned a run without the patch, check its learning rate and its clipping threshold again.
Remove code that multiplies gradients of earlier stages to compensate, for example in a hook. Training can continue from
checkpoints; for some steps, Adam's moments in these checkpoints still reflect the smaller gradients.""",
    references=("https://github.com/deepspeedai/DeepSpeed/pull/8154",),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.18.3,<0.18.4"),
            (
                Rewrite(
                    target=_SCALE,
                    pattern="grad / self.gradient_accumulation_steps()",
                    replacement="grad / self.gradient_accumulation_steps() if $DIVIDES(self) else grad",
                    unless=("self._scale_wrt_gas",),
                    uses=_USES,
                ),
            ),
            unless_defined=_REPAIRED,
        ),
        Variant(
            Guard("deepspeed", ">=0.18.4,<0.19.3"),
            (
                Rewrite(
                    target=_SCALE,
                    pattern="grad is not None and self._scale_wrt_gas",
                    replacement="grad is not None and self._scale_wrt_gas and $DIVIDES(self)",
                    uses=_USES,
                ),
            ),
            unless_defined=_REPAIRED,
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.19.3",
    conditions=(Condition(_SCALE, f"{__package__}._conditions:divided_again", "gradient x"),),
)
