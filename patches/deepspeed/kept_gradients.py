"""bf16 without ZeRO trains on a step's own gradients."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_STEP = "deepspeed.runtime.engine:DeepSpeedEngine._take_model_step"

PATCH = Patch(
    name="deepspeed-kept-gradients",
    summary="bf16 without ZeRO trains on the gradients of each step, not on the sum over all steps",
    harm="wrong gradient",
    bug="bf16 without ZeRO never clears gradients, so each step adds those of all steps before",
    when='"bf16": {"enabled": true} without ZeRO, an optimizer other than FusedAdam, and no code that clears gradients',
    excluded_by=("zero_optimization.stage=1|2|3",),
    symptom="""\
DeepSpeed with `bf16` and no `zero_optimization`, or stage 0: the gradient norm grows with every step, and training is
unstable. No error is raised. In a test of four steps, the weights moved 1.4 of the right way into a wrong
direction. transformers' Trainer clears gradients itself after each step, and is not affected.""",
    cause="""\
After a step with `bf16`, the engine clears gradients only with ZeRO: another optimizer used to clear its own. Since
0.17.6 the one for `bf16` without ZeRO is `FP16_UnfusedOptimizer`, which does not, or for `FusedAdam`, which a
configuration's `Adam` and `AdamW` are, `FP16_Optimizer`, which does not with `legacy_fusion` alone. The bug was
reproduced in 0.17.6, 0.18.2, 0.18.3 and 0.18.5; 0.18.6 has the repair.""",
    repair="""\
After a step, the engine calls the optimizer's own `zero_grad()`, as 0.18.6 does. ZeRO, pipelines, float32 and fp16 are
not affected. A subclass of the optimizer, or a `step` or `zero_grad` of your own, is as released. If your code clears
gradients itself after each step, nothing changes. The patch cannot see that, so reports count such runs, those of
transformers' Trainer among them.

In 0.18.3 to 0.18.5, `bf16` without ZeRO also needs `deepspeed-unscaled-loss`, which is on by default.""",
    changes_numbers="""\
From 0.17.6 to 0.18.5, bf16 without ZeRO trained on the sum of all gradients since the start of the process, unless the
caller cleared gradients itself, as transformers' Trainer does. With the patch, steps are those of ZeRO-1. If you tuned
a run without the patch, check its learning rate and its clipping threshold again. Training can continue from
checkpoints, which hold no gradients.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/issues/7837",
        "https://github.com/deepspeedai/DeepSpeed/pull/7839",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.17.6,<0.18.6"),
            (
                Rewrite(
                    target=_STEP,
                    pattern='self.zero_optimization() and hasattr(self.optimizer, "zero_grad")',
                    replacement='$CLEARED(self) and hasattr(self.optimizer, "zero_grad")',
                    uses={"CLEARED": f"{__package__}._of_half_precision:cleared"},
                ),
            ),
            where_defined=("deepspeed.runtime.engine:DeepSpeedEngine.is_sanity_checks_enabled",),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.18.6",
    conditions=(Condition(_STEP, f"{__package__}._half_precision_conditions:keeps_gradients"),),
)
