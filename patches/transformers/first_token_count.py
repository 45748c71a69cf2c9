"""transformers: ``Trainer`` counts labels of a first token, which nothing predicts, for GPT-2 and a few others."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_FOUND = 'LOSS_MAPPING.get(getattr(model_to_inspect, "loss_type", None))'

PATCH = Patch(
    name="transformers-first-token-count",
    summary="GPT-2's loss is divided by the number of predicted tokens",
    harm="wrong gradient",
    bug="gradient and loss are too small: Trainer counts the first token of each row, which nothing predicts",
    when="GPT2LMHeadModel, BertLMHeadModel, CTRL, Reformer, Idefics 1; labels that begin with a token that counts",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral",),
    symptom="""\
`Trainer` trains GPT-2 on a gradient that is too small, if the labels of its rows begin with a token that counts: of n
labels in a step's rows, n - rows are predicted, and the loss is divided by n. It is 0.818 of its size with 8 rows of 5
or 6 tokens, 0.999 with 1024 tokens a row. The same holds for `BertLMHeadModel`, `BertGenerationDecoder`,
`CTRLLMHeadModel`, `OpenAIGPTLMHeadModel`, `ReformerModelWithLMHead`, `IdeficsForVisionText2Text`,
`EvollaForProteinText2Text` and `NemotronH_Omni_Reasoning_V3`. Steps with short rows have less weight than others.
Llama and all classes named `...ForCausalLM` are not affected. No error.""",
    cause="""\
Since 5.10.1 `Trainer` counts `labels[..., 1:]` if the model's loss shifts the labels. It looks up
`LOSS_MAPPING.get(model.loss_type)`, which has no entry for a class whose name contains none of the mapping's names.
The model's `loss_function` then falls back to `ForCausalLMLoss`, which shifts.""",
    repair="""\
For these classes, and subclasses that change nothing, the patch makes `Trainer` treat the loss as one that shifts, as
for Llama. The gradient is then that of the mean over the predicted tokens.

The patch acts if all code that computes the loss is transformers' own or TRL's `SFTTrainer`, and checks this before
each count. With your own loss (`compute_loss`, `compute_loss_func`, the class's or the model's `loss_function`),
`training_step` or count, label smoothing, or PEFT's prompt learning, whose first label is predicted, all is left as
released. So is any other model, and so are labels whose first token does not count, bit for bit. A trainer that sets
`_loss_shifts_labels` itself keeps its value.

The patch does not detect code that scales the gradients in a callback before the optimizer's step: remove it if it
corrects this count. With a hook of a gradient all is left as released.

Not repaired: 4.46.2 to 5.10.0, which count the first token of every causal model.""",
    references=("https://github.com/huggingface/transformers/pull/46204",),
    variants=(
        Variant(
            Guard("transformers", ">=5.10.1,<=5.24.0"),
            (
                Rewrite(
                    target="transformers.trainer:Trainer.__init__",
                    pattern=_FOUND,
                    replacement=f"$LOSS(self, model_to_inspect, compute_loss_func, {_FOUND})",
                    inside=f"{_FOUND} is ForCausalLMLoss",
                    uses={"LOSS": f"{__package__}._default_loss:loss_of"},
                ),
                Rewrite(
                    target="transformers.trainer:Trainer._get_num_items_in_batch",
                    pattern="self._loss_shifts_labels",
                    replacement="$SHIFTS(self)",
                    uses={"SHIFTS": f"{__package__}._default_loss:shifts"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest transformers in use asks the model for its loss; no release so far does",
    changes_numbers="""\
Since 4.46.2, GPT-2 and the others have been trained on a gradient that is smaller by the share of first tokens, if
these count. The patch repairs this from 5.10.1 on. The share is 0.1 percent for rows of 1024 tokens, and Adam hides a
factor that is the same in each step. With rows of few tokens review clipping and learning rate.""",
    conditions=(
        Condition("transformers.trainer:Trainer._get_num_items_in_batch", f"{__package__}._default_loss:of_others"),
    ),
)
