"""transformers: ``Trainer`` counts labels of a first token, which nothing predicts, of GPT-2 and a few others."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_FOUND = 'LOSS_MAPPING.get(getattr(model_to_inspect, "loss_type", None))'

PATCH = Patch(
    name="transformers-first-token-count",
    summary="GPT-2's loss is divided by the number of tokens that are predicted",
    harm="wrong gradient",
    bug="gradient and loss are too small: the first token of each row, which nothing predicts, is counted",
    when="GPT2LMHeadModel, BertLMHeadModel, CTRL, Reformer, Idefics 1; labels that begin with a token that counts",
    symptom="""\
`Trainer` trains GPT-2 on a gradient that is too small, where the labels of its rows begin with a token that counts: of
n labels in a step's rows, n - rows are predicted, and the loss is divided by n. It is 0.818 of its size with 8 rows of
5 or 6 tokens, 0.999 with 1024 tokens a row. The same for `BertLMHeadModel`, `BertGenerationDecoder`,
`CTRLLMHeadModel`, `OpenAIGPTLMHeadModel`, `ReformerModelWithLMHead`, `IdeficsForVisionText2Text`,
`EvollaForProteinText2Text` and `NemotronH_Omni_Reasoning_V3`. Steps with short rows weigh less than others. Llama and
all that is named `...ForCausalLM` is right. No error.""",
    cause="""\
Since 5.10.1 `Trainer` counts `labels[..., 1:]` where the model's loss shifts them. It asks
`LOSS_MAPPING.get(model.loss_type)`, which has nothing for a class whose name contains none of the names there; the
model's `loss_function` takes `ForCausalLMLoss` then, which shifts.""",
    repair="""\
For these classes, and those that inherit them and change nothing, `Trainer` is told that the loss shifts, as it is for
Llama. The gradient is then that of the mean over the tokens that are predicted.

It is told so where all that makes the loss is transformers' own or TRL's `SFTTrainer`, which is looked at before each
count. With a loss of your own (`compute_loss`, `compute_loss_func`, the class's or the model's `loss_function`), a
`training_step` or a count of your own, label smoothing, or PEFT's prompt learning, whose first label is predicted, all
is left as released. So is any other model, and labels whose first token does not count, bit for bit. A trainer that
sets `_loss_shifts_labels` itself keeps that.

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
    obsolete_when="when the oldest transformers in use asks the model for its loss; none released so far does",
    changes_numbers="""\
GPT-2 and the others were trained on a gradient that was smaller by the share of first tokens, where these count: since
4.46.2, with the patch in 5.10.1 to 5.23.0 no more. It is 0.1 percent for rows of 1024 tokens, and Adam hides a factor
that is the same in each step. With rows of few tokens look at clipping and learning rate again.""",
    conditions=(
        Condition("transformers.trainer:Trainer._get_num_items_in_batch", f"{__package__}._default_loss:of_others"),
    ),
)
