"""DeepSpeed's pipelines: the accumulation steps divide a gradient once, in the last stage."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant


def divides(engine: Any) -> bool:
    """Whether gradients of an engine's outputs are to be divided: not those that a pipeline's stage gets from the next.

    By the class: other engines have no stages, and may have a name of the user's own ``is_last_stage``.

    Args:
        engine: a DeepSpeedEngine.
    """
    pipelines: Any = sys.modules.get("deepspeed.runtime.pipe.engine")  # a pipeline's engine has imported it
    return pipelines is None or not isinstance(engine, pipelines.PipelineEngine) or bool(engine.is_last_stage())


_SCALE = "deepspeed.runtime.engine:DeepSpeedEngine._backward_prologue_per_tensor"
_USES = {"DIVIDES": f"{__name__}:{divides.__name__}"}
# 0.19.3 repairs it in the pipeline's own engine and leaves this as it is; a method that is new tells it.
_REPAIRED = ("deepspeed.runtime.engine:DeepSpeedEngine._validate_zero3_moe_compatibility",)

PATCH = Patch(
    name="deepspeed-pipeline-accumulation",
    summary="a pipeline's gradient is divided by the accumulation steps once, not once more in each earlier stage",
    harm="wrong gradient",
    bug="each stage of a pipeline divides the gradient by gradient_accumulation_steps once again",
    when="a PipelineModule of 2 stages or more, and gradient_accumulation_steps above 1",
    excluded_by=("gradient_accumulation_steps=1",),
    symptom="""\
DeepSpeed 0.18.3 to 0.19.2, a `PipelineModule` of two stages or more, and a `gradient_accumulation_steps` of N above 1.
The last stage is right. The one before it has 1/N of its gradient, the one before that 1/N**2, and so on: 0.250 and
0.0625 with 4 micro-batches. The loss that is reported is right. Gradient norms are too low. No error.""",
    cause="""\
From 0.18.3 the engine divides gradients in a hook on the outputs of its module. The last stage's is on the loss. An
earlier stage's is on what it sends on, and what it gets back there has been divided by the stage after it.""",
    repair="""\
Only the last stage divides, as in 0.19.3. Engines without stages, and pipelines of one stage, are as released.

0.18.3 and 0.18.4 train pipelines with ZeRO-1 in bfloat16 or float32 only: without ZeRO they raise "Direct calls to
tensor.backward() are not supported", with the patch too.""",
    changes_numbers="""\
From 0.18.3 to 0.19.2 every stage but the last has trained on a gradient that was `gradient_accumulation_steps` times
too small, once for each stage after it. With the patch it has the whole one, and the norm rises. Adam divides such a
factor away, apart from its epsilon, clipping and weight decay; with SGD earlier stages have hardly trained. A run that
was tuned without it should have its learning rate and its clipping threshold looked at again. Code that multiplies
gradients of earlier stages itself, in a hook say, to make up for it, has to stop. Checkpoints can be trained on; Adam's
moments in them are those of the smaller gradients for some steps.""",
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
)
