"""Online DPO, Nash-MD and XPO: a gradient of one size however many micro-batches an optimizer step has."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_CLASSES = {"online_dpo": "OnlineDPOTrainer", "nash_md": "NashMDTrainer", "xpo": "XPOTrainer"}


def _divided(module: str, kind: str) -> Rewrite:
    return Rewrite(
        target=f"trl.{module}.{kind}_trainer:{_CLASSES[kind]}.training_step",
        pattern="self.accelerator.backward(loss, **kwargs)",
        replacement="self.accelerator.backward($DIVIDED(self, loss), **kwargs)",
        # That the mean of a micro-batch is meant: what is logged is divided.
        alongside=("return loss.detach() / self.args.gradient_accumulation_steps",),
        unless=("loss / $STEPS", "loss /= $STEPS", "self.current_gradient_accumulation_steps"),
        uses={"DIVIDED": f"{__package__}._window:divided"},
    )


PATCH = Patch(
    name="trl-online-dpo-accumulation",
    summary="Online DPO's, Nash-MD's and XPO's gradient does not depend on the number of micro-batches",
    harm="wrong gradient",
    bug="the gradient is multiplied by gradient_accumulation_steps",
    when="OnlineDPOTrainer, NashMDTrainer or XPOTrainer with gradient_accumulation_steps above 1, without DeepSpeed",
    excluded_by=("gradient_accumulation_steps=1",),
    symptom="""\
`OnlineDPOTrainer`, `NashMDTrainer` and `XPOTrainer` train on a gradient that is `gradient_accumulation_steps` times too
large, with transformers 4.46.2 to 5.1 and since 5.5.4: with 8 micro-batches `grad_norm` is 8 times that of one large
batch. No error, and the loss in the log is right. Adam hides it, and so does clipping: with 8 steps the default
`max_grad_norm` of 1.0 is one of 0.125.""",
    cause="""\
Their `training_step` hands the mean of a micro-batch to `accelerator.backward` and divides only what it returns for the
log. Until 4.46.1 transformers had accelerate divide by the number of steps, and from 5.2.0 to 5.5.3 again; in the other
releases accelerate's number of steps is 1, and `Trainer.training_step`, which these trainers override, divides.""",
    repair="""\
What is given to `backward` is divided by the micro-batches of the step, as in `Trainer.training_step`: of the last step
of an epoch by those that it has, where transformers counts them. The gradient is then that of the mean over all
prompts of the step, where its micro-batches have as many each. Bit for bit what they were: one micro-batch per step,
what is logged, runs in which accelerate divides (transformers 5.2.0 to 5.5.3), and DeepSpeed, whose engine divides by
itself.

Left as released, with one line on rank 0 that names it: a `training_step`, a `_compute_losses` or an
`accelerator.backward` that is not TRL's and accelerate's own, since it may divide already.

Left alone: what is logged of a last step with fewer micro-batches, which is divided by the setting all the same;
NVIDIA's apex (`use_apex`, until TRL 0.23), where the same is wrong; and TRL before 0.12, whose `training_step` these
releases of transformers cannot call.""",
    changes_numbers="""\
Since transformers 4.46.2, but not with 5.2.0 to 5.5.3, Online DPO, Nash-MD and XPO without DeepSpeed trained on
gradients `gradient_accumulation_steps` times their size, and logged their norms so. With the patch they have their
size. A run that was tuned with it should have its clipping threshold divided by that number, and with SGD its learning
rate multiplied by it; Adam sees the factor in clipping and in its epsilon only. Take a correction of your own out that
is elsewhere, as in a callback or an optimizer.""",
    references=("https://github.com/huggingface/transformers/pull/34511",),
    variants=(
        Variant(
            Guard("trl", ">=0.12.0,<0.26.0"),
            tuple(_divided("trainer", kind) for kind in _CLASSES),
            independent=True,
        ),
        Variant(
            Guard("trl", ">=0.26.0,<1.14.0"),
            tuple(_divided(f"experimental.{kind}", kind) for kind in _CLASSES),
            independent=True,
        ),
        Variant(
            Guard("trl", ">=1.14.0,<=1.16.0"),
            (_divided("experimental.online_dpo", "online_dpo"),),
        ),
    ),
    obsolete_when="when the oldest trl in use divides by itself; none released so far does",
    conditions=tuple(
        Condition(_divided(where.format(kind), kind).target, f"{__package__}._conditions:micro_batches", "gradient x")
        for where in ("trainer", "experimental.{}")
        for kind in _CLASSES
    ),
)
