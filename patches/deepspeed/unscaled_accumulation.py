"""DeepSpeed's gradient accumulation without a reduction in `backward`, in pipelines and `no_sync()`."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_BACKWARD = "deepspeed.runtime.engine:DeepSpeedEngine.backward"  # before 0.16.5
_PROLOGUE = "deepspeed.runtime.engine:DeepSpeedEngine._backward_prologue"
_REDUCES = "self.enable_backward_allreduce and not self.inside_no_sync_ctxt"
_SCALES = "loss = self._scale_loss_by_gas(loss.float())"


def _with_deepcompile(versions: str, asked: str) -> Variant:
    """The variant that does not change the divisor of DeepCompile's gradients."""
    return Variant(
        Guard("deepspeed", versions),
        (
            Rewrite(
                target=_PROLOGUE,
                pattern=f"{_REDUCES} and not self.{asked}()",
                replacement=f"not self.{asked}()",
                alongside=(_SCALES,),
            ),
        ),
    )


PATCH = Patch(
    name="deepspeed-unscaled-accumulation",
    summary="pipelines and no_sync() divide each loss by gradient_accumulation_steps too",
    harm="wrong gradient",
    bug="the gradient is the sum over micro-batches, not the mean",
    when="a PipelineModule, or engine.no_sync(), and gradient_accumulation_steps above 1",
    excluded_by=("gradient_accumulation_steps=1",),
    symptom="""\
The bug affects DeepSpeed 0.16.0 to 0.18.2, with `gradient_accumulation_steps` of N above 1. A `PipelineModule` trains
on N times its gradient: 4.000 times with 4 micro-batches, in every stage. Outside pipelines, micro-batches inside
`engine.no_sync()` count N times as much as those outside it. Accelerate's `accumulate()` enters `no_sync()` for ZeRO-0
and ZeRO-1. The reported loss is right. Gradient norms are N times too high, and clipping hides this factor. No error is
raised.""",
    cause="""\
0.16.0 added `no_sync()`. Since then, `backward` divides the loss by the accumulation steps only if it also reduces
gradients. Pipelines reduce gradients themselves later, and disable the reduction in `backward`
(`enable_backward_allreduce`).""",
    repair="""\
`backward` divides the loss by the accumulation steps whether or not it reduces gradients, as before 0.16.0 and since
0.18.3.

The patch does not change `scale_wrt_gas=False`, with which the caller divides (transformers' Trainer does so if it
counts tokens), or DeepCompile, whose losses are as released.""",
    changes_numbers="""\
From 0.16.0 to 0.18.2, gradients of pipelines, and of micro-batches in `no_sync()`, were `gradient_accumulation_steps`
times too large. With the patch, their norms fall by that factor. Adam's steps hardly change if clipping is inactive. If
you tuned the learning rate or the clipping threshold of a run without the patch (SGD, or clipping that was always
active), check both again. If only some micro-batches are in `no_sync()`, all have the same weight now. Remove code
inside `no_sync()` that divides by the steps itself to compensate. If the `loss_fn` of a `PipelineModule` divides by the
number of micro-batches, remove this division too: with it and the patch the gradient is N times too small. Training can
continue from checkpoints.""",
    references=("https://github.com/deepspeedai/DeepSpeed/pull/6675",),
    variants=(
        Variant(
            Guard("deepspeed", ">=0.16.0,<0.16.5"),
            (
                Rewrite(
                    target=_BACKWARD,
                    pattern="do_gradient_reduction and self.gradient_accumulation_steps() > 1 and scale_wrt_gas",
                    replacement="self.gradient_accumulation_steps() > 1 and scale_wrt_gas",
                    alongside=(_SCALES,),
                ),
            ),
        ),
        Variant(
            Guard("deepspeed", ">=0.16.5,<0.16.6"),
            (
                Rewrite(
                    target=_PROLOGUE,
                    pattern=f"do_gradient_reduction = {_REDUCES}",
                    replacement="do_gradient_reduction = True",
                    alongside=(_SCALES,),
                ),
            ),
        ),
        _with_deepcompile(">=0.16.6,<0.18.0", "is_deepcompile_enabled"),
        _with_deepcompile(">=0.18.0,<0.18.3", "is_deepcompile_active"),
    ),
    obsolete_when="when the oldest DeepSpeed in use is 0.18.3",
    conditions=tuple(
        Condition(target, f"{__package__}._conditions:counts_several_times", "gradient x")
        for target in (_BACKWARD, _PROLOGUE)
    ),
)
