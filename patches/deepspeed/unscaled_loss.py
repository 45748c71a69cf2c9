"""fp16 without ZeRO trains on a loss that is scaled, as the step expects."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_BACKWARD = "deepspeed.runtime.engine:DeepSpeedEngine.backward"
_STEP = "deepspeed.runtime.engine:DeepSpeedEngine._take_model_step"

PATCH = Patch(
    name="deepspeed-unscaled-loss",
    summary="fp16 without ZeRO scales the loss by what the step divides gradients by",
    harm="wrong gradient",
    bug="fp16 without ZeRO divides every gradient by the loss scale, and never multiplies the loss by it",
    when='"fp16": {"enabled": true} without ZeRO; before 0.18.6 bf16 without ZeRO and FusedAdam, too',
    excluded_by=("zero_optimization.stage=1|2|3",),
    symptom="""\
DeepSpeed with `fp16` and no `zero_optimization`, or stage 0: the loss hardly falls. Every gradient is too small by the
loss scale, 65,536 at the start by default. SGD moves nothing. Adam does not notice a factor until its `eps` counts,
which it then does for most parameters. Clipping never clips. With `FusedAdam`, which a configuration's `Adam` and
`AdamW` are, the logged gradient norm is the true one divided by the scale; with other optimizers it is right. Small
gradients become 0, against which the loss is scaled in the first place. No error is raised. Up to 0.18.5, `bf16` has
the same bug with other optimizers than `FusedAdam`.""",
    cause="""\
Since 0.18.3, `engine.backward` scales the loss for ZeRO's optimizers only, and `FP16_Optimizer` and
`FP16_UnfusedOptimizer` still divide by their scale in `step()`. The bug was reproduced in 0.18.3, 0.18.5, 0.18.6,
0.18.9, 0.19.2, 0.19.5 and 0.19.8, on a CPU. 0.18.6 sets the scale of `bf16` to 1.""",
    repair="""\
`engine.backward(loss)` multiplies the loss by the optimizer's current scale, in float32, as releases before 0.18.3 did.
With a scale of 1 nothing changes. The value that `backward` returns is the loss, as released. Checkpoints hold the
optimizer's scale with and without the patch. Between `backward()` and `step()`, the parameters' `grad` is that of the
scaled loss, as before 0.18.3. The engine's gradient norm is of unscaled gradients, with every optimizer: up to 0.18.2
it had the scale as a factor, except with `FusedAdam`.

The patch does not repair a loss scaler of your own (`override_loss_scale`), or an engine, an optimizer class or a
`step` of your own. If your code multiplies the loss by the scale, remove that.""",
    changes_numbers="""\
From 0.18.3 on, fp16 without ZeRO trained on gradients that were too small by the loss scale. With the patch, steps and
clipping are those of 0.18.2 and of ZeRO. If you tuned a run without the patch, check its learning rate, its `eps` and
its clipping threshold again. Training can continue from checkpoints; for some steps, Adam's moments in them still
reflect the smaller gradients, so begin with a warm-up, or finish the run with the patch disabled.""",
    references=(
        "https://github.com/deepspeedai/DeepSpeed/pull/8393",
        "https://github.com/deepspeedai/DeepSpeed/issues/7837",
    ),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.18.3,<=0.19.8"),
            (
                Rewrite(
                    target=_BACKWARD,
                    pattern="loss.backward(**backward_kwargs)",
                    replacement="$SCALED(self, loss).backward(**backward_kwargs)",
                    alongside=("loss = self.optimizer.scale_if_loss(loss)",),
                    uses={"SCALED": f"{__package__}._of_half_precision:scaled"},
                ),
                Rewrite(
                    target=_STEP,
                    pattern="self._global_grad_norm = self.optimizer._global_grad_norm",
                    replacement="self._global_grad_norm = $NORM(self)",
                    uses={"NORM": f"{__package__}._of_half_precision:norm"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest DeepSpeed in use scales it; 0.19.8, the newest, does not",
    conditions=(Condition(_BACKWARD, f"{__package__}._half_precision_conditions:divides_unscaled", "gradient x"),),
)
