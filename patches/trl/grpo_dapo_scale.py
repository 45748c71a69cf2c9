"""GRPO's default loss: divided by the tokens of one optimizer step, not of one generation."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="trl-grpo-dapo-scale",
    summary="GRPO's dapo, cispo and vespo losses do not depend on the number of generations per optimizer step",
    harm="wrong gradient",
    bug="the loss is multiplied by gradient_accumulation_steps / steps_per_generation",
    when=(
        "GRPOTrainer with loss_type dapo (the default), cispo or vespo, and steps_per_generation other than "
        "gradient_accumulation_steps"
    ),
    excluded_by=("loss_type=grpo|bnpo|dr_grpo|luspo|sapo", "trl=sft|dpo|kto|reward|rloo"),
    symptom="""\
`GRPOTrainer` with `loss_type="dapo"` (the default), `"cispo"` or `"vespo"`, and a `steps_per_generation` (or a
`generation_batch_size`) that differs from `gradient_accumulation_steps`: loss and gradient are
`gradient_accumulation_steps / steps_per_generation` times their correct size. With 2 and 4 they are half; with 32 and
8, which TRL's own documentation gives for Lite PPO, four times. No error. If the two numbers are equal, as they are by
default, the loss is right.""",
    cause="""\
These losses are sums over tokens, divided by `num_items_in_batch`, the tokens of a whole generation batch of
`steps_per_generation` micro-batches. An optimizer step accumulates `gradient_accumulation_steps` micro-batches.""",
    repair="""\
In training the patch multiplies the divisor by `gradient_accumulation_steps / steps_per_generation`, as in 1.9.1.
Averaged over the optimizer steps of a generation, or over the generations of an optimizer step, the loss is then
DAPO's, the mean over all tokens: equation 8 of [DAPO](https://arxiv.org/abs/2503.14476), section 3.1 of
[MiniMax-M1](https://arxiv.org/abs/2506.13585) for cispo. Evaluation, other losses and equal numbers stay bit for bit
identical.

Not repaired: the experimental trainers that have their own such sum (PAPO, GSPO-token), and Liger's loss, which divides
by other numbers. The patch does not change a `training_step`, `compute_loss`, `_compute_loss`, `_prepare_inputs`,
`_generate_and_score_completions`, `_generate` or `accelerator.backward` that is not TRL's, transformers' or
accelerate's own (in a subclass, by assignment or within a decorator), and logs its name in one line on rank 0. Such
code may correct the size already. Your own training loop, `_clip_grad_norm` or a hook of a parameter's gradient may do
so as well: with these, too, the patch changes nothing.""",
    changes_numbers="""\
Since TRL 0.22.0, GRPO with a dapo, cispo or vespo loss, S `steps_per_generation` and A `gradient_accumulation_steps`
other than S, trained on gradients A / S times their size, and logged such gradient norms. With the patch gradients have
their correct size. If a run was tuned without the patch, multiply its clipping threshold by S / A, and with SGD its
learning rate by A / S; with Adam, the factor matters only for clipping and epsilon.""",
    references=(
        "https://github.com/huggingface/trl/issues/5619",
        "https://github.com/huggingface/trl/pull/6024",
        "https://github.com/huggingface/trl/pull/3938",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.22.0,<1.9.1"),
            (
                Rewrite(
                    target="trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
                    pattern="normalizer = $TOKENS / self.accelerator.num_processes",
                    replacement=(
                        "normalizer = $TOKENS / self.accelerator.num_processes"
                        " * ($PART(self) if self.model.training else 1.0)"
                    ),
                    uses={"PART": f"{__package__}._window:part_of_a_generation"},
                    alongside=('inputs["num_items_in_batch"]',),
                    unless=("self.args.steps_per_generation",),
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.9.1",
    conditions=(
        Condition(
            "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss",
            f"{__package__}._conditions:part_of_a_generation",
            "gradient x",
        ),
    ),
)
