"""GKD's and GOLD's losses on generated completions: divided by the number of generated tokens."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_STEP = "trl.experimental.gkd.gkd_trainer:GKDTrainer.training_step"
_OURS = f"{__package__}._generated_count"
_LOSS = "trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss"
_GOLD = "trl.experimental.gold.gold_trainer:GOLDTrainer.compute_loss"
_SHIFTED = 'shifted_labels = inputs["labels"][:, 1:]'
_LABELS = 'inputs["labels"] = new_labels'
_SUPER = "super().training_step(model, inputs, num_items_in_batch)"

PATCH = Patch(
    name="trl-gkd-generated-count",
    summary="GKD's and GOLD's losses on generated completions are divided by the number of generated tokens",
    harm="wrong gradient",
    bug="the loss on completions that the student generates is divided by the number of tokens of the data set",
    when="GKDTrainer or GOLDTrainer with lmbda above 0 (the default is 0.5), GKDTrainer with seq_kd",
    excluded_by=("trl=sft|dpo|grpo|kto|reward|rloo",),
    symptom="""\
`GKDTrainer` or `GOLDTrainer` with `lmbda` above 0, or `GKDTrainer` with `seq_kd`: the size of the gradient and the
logged loss depends on the answers of the data set, which are not trained on. If these have 500 tokens and the student
generates 125, both are a quarter of their correct size. Steps have other weights than their tokens. No error.""",
    cause="""\
transformers counts the labels of a step's batches before the trainer sees them. Since TRL 1.7.0, both divide the
divergence by that number. They replace the answers with generated ones after the count.""",
    repair="""\
The patch counts the tokens of the micro-batches that the step trains on, generated or not, on all ranks with
`average_tokens_across_devices` (the default). The step's gradient and logged loss are then those of the mean over these
tokens. GOLD generates a step's micro-batches together. GKD knows the number once it has generated the last one. With
gradient accumulation the patch therefore multiplies the gradient of the earlier micro-batches once, in place, before
the last one's backward pass. On several ranks one collective per step adds the numbers, in each step of a run that may
generate.

Steps in which no rank has generated stay bit for bit identical, and so do `lmbda=0` without `seq_kd`, and evaluation.
What is sampled does not change. `trl-distillation-scale` repairs other factors of the same losses: the number of ranks
and, in GOLD, of micro-batches. If both patches are applied, all factors are right.

Not repaired: GKD's gradient accumulation with DeepSpeed or FSDP, which keep gradients themselves (the patch logs so);
runs with a `parallelism_config` or several GPUs in one process; Liger's losses up to 1.13.0; GOLD's images, which are
not counted. The patch does not change a loss, `compute_loss`, `training_step`, `get_batch_samples`,
`_get_num_items_in_batch` or `accelerator.backward` that is not TRL's, transformers' or accelerate's own, and logs its
name in one line on rank 0. Such code may count generated tokens already. The same applies to GOLD's
`get_train_dataloader` or `_get_train_sampler`, a training loop, a `_clip_grad_norm` or a hook of a parameter's gradient
of your own.""",
    changes_numbers="""\
Since TRL 1.7.0, GKD and GOLD with generated completions trained on gradients that were d / g times their size, where d
is the number of answer tokens in the data set and g that of generated tokens; the quotient differs from step to step.
With the patch gradients and the logged loss have their correct size. If a run was tuned without the patch, review its
clipping threshold, and with SGD its learning rate. Adam is invariant to a factor that is the same in each step.""",
    references=(
        "https://github.com/huggingface/trl/issues/4719",
        "https://arxiv.org/abs/2306.13649",
    ),
    variants=(
        Variant(
            Guard("trl", ">=1.7.0,<=1.16.0"),
            (
                Rewrite(
                    _STEP,
                    _LABELS,
                    'inputs["labels"] = $GENERATED(new_labels)',
                    matches=2,
                    alongside=(_SUPER,),
                    uses={"GENERATED": f"{_OURS}:generated"},
                ),
                Rewrite(
                    _LOSS,
                    _SHIFTED,
                    f"{_SHIFTED}; num_items_in_batch = $DIVISOR(num_items_in_batch)",
                    alongside=("self.generalized_jsd_loss($$$ARGUMENTS, num_items_in_batch=num_items_in_batch)",),
                    uses={"DIVISOR": f"{_OURS}:divisor"},
                ),
                Rewrite(
                    _GOLD,
                    _SHIFTED,
                    f"{_SHIFTED}; num_items_in_batch = $OF_A_BUFFER(self, inputs, num_items_in_batch)",
                    alongside=("self.generalized_jsd_loss($$$ARGUMENTS, num_items_in_batch=num_items_in_batch)",),
                    uses={"OF_A_BUFFER": f"{_OURS}:divisor_of_a_buffer"},
                ),
                Rewrite(
                    _STEP,
                    _SUPER,
                    "$STEP(self, super().training_step, model, inputs, num_items_in_batch)",
                    alongside=(_LABELS,),
                    uses={"STEP": f"{_OURS}:step"},
                ),
            ),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest trl in use counts generated tokens; no release so far does",
    conditions=(Condition(_STEP), Condition(_GOLD)),
)
