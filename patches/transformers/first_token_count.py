"""transformers: ``Trainer`` counts labels of a first token, which is never predicted, for GPT-2 and a few others."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_FOUND = 'LOSS_MAPPING.get(getattr(model_to_inspect, "loss_type", None))'

PATCH = Patch(
    name="transformers-first-token-count",
    summary="GPT-2's loss is divided by the number of predicted tokens",
    harm="wrong gradient",
    bug="gradient and loss are too small: Trainer counts the first token of each row, which is never predicted",
    when="GPT2LMHeadModel, BertLMHeadModel, CTRL, Reformer, Idefics 1; rows whose first label is not -100",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral",),
    symptom="""\
`Trainer` trains GPT-2 on a gradient that is too small, if the first label of each row is not -100. If a step has n
labels in r rows, n - r labels are predicted, but the loss is divided by n. The gradient is 0.818 times its correct size
with 8 rows of 5 or 6 tokens, and 0.999 times with 1024 tokens a row. The same holds for `BertLMHeadModel`,
`BertGenerationDecoder`, `CTRLLMHeadModel`, `OpenAIGPTLMHeadModel`, `ReformerModelWithLMHead`,
`IdeficsForVisionText2Text`, `EvollaForProteinText2Text` and `NemotronH_Omni_Reasoning_V3`. Steps with short rows have
less weight than others. Llama and all classes named `...ForCausalLM` are not affected. No error.""",
    cause="""\
Since 5.10.1 `Trainer` counts `labels[..., 1:]` if the model's loss shifts the labels. It looks up
`LOSS_MAPPING.get(model.loss_type)`, which finds no entry if the name of the model's class contains none of the
mapping's keys. The model's `loss_function` then falls back to `ForCausalLMLoss`, which shifts.""",
    repair="""\
For these classes, and for subclasses that change nothing in the computation of the loss, the patch makes `Trainer`
treat the loss as one that shifts, as for Llama. The gradient is then that of the mean over the predicted tokens.

The patch acts if all code that computes the loss is transformers' own or TRL's `SFTTrainer`, and checks this before
each count. The following stay as released: runs with your own loss (`compute_loss`, `compute_loss_func`, the class's or
the model's `loss_function`), `training_step` or count of tokens, with label smoothing, or with PEFT's prompt learning,
in which the first label is predicted. Other models, and rows whose first label is -100, stay as released, bit for bit.
A trainer that sets `_loss_shifts_labels` itself keeps its value.

The patch does not detect code that scales the gradients in a callback before the optimizer's step: remove such code if
it corrects this count. If a gradient has a hook, the run stays as released.

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
    obsolete_when="when the oldest transformers in use looks at the loss that the model uses; no release so far does",
    changes_numbers="""\
Since 4.46.2, GPT-2 and the others have been trained on a gradient that is smaller by the share of first tokens, if
their labels are not -100. The patch repairs this from 5.10.1 on. The share is 0.1 percent for rows of 1024 tokens, and
Adam is invariant to a factor that is the same in each step. If rows have few tokens, review clipping and learning
rate.""",
    conditions=(
        Condition("transformers.trainer:Trainer._get_num_items_in_batch", f"{__package__}._default_loss:of_others"),
    ),
)
