"""Online DPO, Nash-MD and XPO: the gradient's size does not depend on the number of micro-batches of a step."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_CLASSES = {"online_dpo": "OnlineDPOTrainer", "nash_md": "NashMDTrainer", "xpo": "XPOTrainer"}


def _divided(module: str, kind: str) -> Rewrite:
    return Rewrite(
        target=f"trl.{module}.{kind}_trainer:{_CLASSES[kind]}.training_step",
        pattern="self.accelerator.backward(loss, **kwargs)",
        replacement="self.accelerator.backward($DIVIDED(self, loss), **kwargs)",
        # The logged loss is divided, so the loss is the mean of a micro-batch.
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
    excluded_by=("gradient_accumulation_steps=1", "trl=sft|dpo|grpo|kto|reward|rloo|gold"),
    symptom="""\
`OnlineDPOTrainer`, `NashMDTrainer` and `XPOTrainer` train on a gradient that is `gradient_accumulation_steps` times
too large, with transformers 4.46.2 to 5.1 and since 5.5.4: with 8 micro-batches `grad_norm` is 8 times that of one
large batch. No error, and the logged loss is right. Adam hides the factor, and so does clipping: with 8 steps the
default `max_grad_norm` of 1.0 acts like 0.125.""",
    cause="""\
Their `training_step` passes the mean of a micro-batch to `accelerator.backward` and divides only the value that it
returns for the log. Until 4.46.1, and again from 5.2.0 to 5.5.3, transformers let accelerate divide by the number of
steps; in the other releases accelerate's number of steps is 1, and `Trainer.training_step`, which these trainers
override, divides.""",
    repair="""\
The patch divides the loss that `backward` receives by the micro-batches of the step, as `Trainer.training_step` does.
For the last step of an epoch it divides by the number of micro-batches that the step has, if transformers counts them.
The gradient is then that of the mean over all prompts of the step, if its micro-batches have equal numbers of prompts.
These stay bit for bit identical: one micro-batch per step, the logged values, runs in which accelerate divides
(transformers 5.2.0 to 5.5.3), and DeepSpeed, whose engine divides by itself.

The patch does not change a trainer with a `training_step`, `_compute_losses` or `accelerator.backward` that is not
TRL's or accelerate's own, since that method may divide already. The patch logs its name in one line on rank 0. The same
applies to a training loop, a `_clip_grad_norm` or a hook of a parameter's gradient of your own.

Not repaired: the logged values of a last step with fewer micro-batches, which TRL divides by the setting all the same;
NVIDIA's apex (`use_apex`, until TRL 0.23), which has the same bug; and TRL before 0.12, whose `training_step` these
releases of transformers cannot call.""",
    changes_numbers="""\
Since transformers 4.46.2, except 5.2.0 to 5.5.3, Online DPO, Nash-MD and XPO without DeepSpeed trained on gradients
`gradient_accumulation_steps` times their size, and logged such gradient norms. With the patch gradients have their
correct size. If a run was tuned without the patch, divide its clipping threshold by that number, and with SGD multiply
its learning rate by it; with Adam, the factor matters only for clipping and epsilon. Remove your own corrections, for
example in a callback or an optimizer.""",
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
    obsolete_when="when the oldest trl in use divides by itself; no release so far does",
    conditions=tuple(
        Condition(_divided(where.format(kind), kind).target, f"{__package__}._conditions:micro_batches", "gradient x")
        for where in ("trainer", "experimental.{}")
        for kind in _CLASSES
    ),
)
