"""transformers: ``Trainer`` leaves out the first label of a row that PEFT's virtual tokens predict."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "transformers.trainer:Trainer._get_num_items_in_batch"
_OURS = f"{__package__}._virtual_tokens"

PATCH = Patch(
    name="transformers-prompt-tuning-count",
    summary="the loss of PEFT's prompt tuning is divided by the number of predicted tokens",
    harm="wrong gradient",
    bug="gradient and loss are too large: Trainer leaves out the first token of each row, which the prompt predicts",
    when="PEFT's prompt tuning or p-tuning of a causal model, and rows whose first label is not -100",
    excluded_by=("trl=dpo|grpo|kto|reward|rloo",),
    symptom="""\
`Trainer` and `SFTTrainer` train PEFT's prompt tuning and p-tuning on a gradient that is too large, if the first label
of each row is not -100. If a step has n labels in r rows, all n are predicted, but the loss is divided by n - r. The
gradient is 1.18 times its correct size with 4 rows of 5 to 8 tokens, and 1.001 times with 1024 tokens a row. The logged
loss is too large as well. Steps with short rows have more weight than others. Rows that begin with an ignored prompt
are not affected. No error.""",
    cause="""\
PEFT puts virtual tokens before each row, so the last of them predicts the row's first token. Since 5.10.1 `Trainer`
counts `labels[..., 1:]` for causal models, because without virtual tokens nothing predicts the first token.""",
    repair="""\
The patch counts all labels if the model is PEFT's `PeftModelForCausalLM` and its active adapter is one of prompt tuning
or p-tuning. The gradient is then that of the mean over the predicted tokens.

The patch acts if all code that computes the loss is transformers', PEFT's or TRL's `SFTTrainer`, and checks this at
each count. The following stay as released: runs with your own loss (`compute_loss`, `compute_loss_func`, the model's
`loss_function`), `training_step` or count of tokens, with label smoothing, with a hook of a gradient, with a subclass
of `PeftModelForCausalLM`, or with another `forward` assigned to the model, as in `with model.disable_adapter()`. LoRA,
prefix tuning, models without PEFT, and rows whose first label is -100 stay as released, bit for bit.""",
    changes_numbers="""\
Since transformers 5.10.1, prompt tuning and p-tuning were trained on a gradient that is too large by the share of first
tokens, if their labels are not -100. The share is 0.1 percent for rows of 1024 tokens, and Adam is invariant to a
factor that is the same in each step. If rows have few tokens, review clipping and learning rate.""",
    references=("https://github.com/huggingface/transformers/pull/46204",),
    variants=(
        Variant(
            Guard("transformers", ">=5.10.1,<=5.24.0"),
            (
                Rewrite(
                    _TARGET,
                    'batch["labels"][..., 1:]',
                    '$PREDICTED(self, batch["labels"])',
                    alongside=("self._loss_shifts_labels",),
                    uses={"PREDICTED": f"{_OURS}:predicted"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest transformers in use counts a prompt's first label; no release so far does",
    conditions=(Condition(_TARGET, f"{_OURS}:of_prompts"),),
)
