"""transformers: the end of a text is a label if padding has the same token."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "transformers.data.data_collator:DataCollatorForLanguageModeling.torch_call"

PATCH = Patch(
    name="transformers-collator-eos",
    summary="the end of a text is a label if the padding token is the same",
    harm="wrong data",
    bug="with pad_token = eos_token the end of a text is never a label, so the model does not learn to stop",
    when="DataCollatorForLanguageModeling with mlm=False, and a tokenizer whose pad_token is its eos_token",
    excluded_by=("trl=dpo|grpo|kto|reward|rloo",),
    symptom="""\
A causal language model is trained with `DataCollatorForLanguageModeling(tokenizer, mlm=False)`, after
`tokenizer.pad_token = tokenizer.eos_token`, which many tutorials have for models without a padding token. The trained
model does not stop: it generates up to `max_new_tokens`. Packed rows have the same, at the end of each text. No
error.""",
    cause="""\
The collator makes a label -100 if it is the padding token, wherever it is. The end of a text has the same token, so it
is ignored as well. The attention mask, which tells the two apart, is not read.""",
    repair="""\
If `pad_token_id` is `eos_token_id`, the patch ignores only the positions of that token whose attention mask is 0. The
ends of texts, whose mask is 1, are labels. In packed rows so are the ends between texts. The first token of a row is no
end, and stays ignored: some models begin a text with the same token.

Another padding token, masked language modeling, other tensors than torch's, and examples without an `attention_mask`
of their own stay as released, bit for bit: an example that was padded before has no other sign of it. A subclass with
its own `torch_call` stays as released, too. The patch adds no end: tokenize your texts with one.""",
    changes_numbers="""\
With the patch each text has one more label, its end, and the model learns to stop. Losses change slightly, the most for
short texts. A model that was trained without the patch may need its end token trained: a short run suffices to see it
in the generations.""",
    references=(
        "https://github.com/huggingface/transformers/issues/23530",
        "https://github.com/huggingface/transformers/pull/27474",
    ),
    variants=(
        Variant(
            Guard("transformers", ">=4.45.2,<=5.24.0"),
            (
                Rewrite(
                    _TARGET,
                    "labels == self.tokenizer.pad_token_id",
                    "$PADDING(self, labels, batch, examples)",
                    uses={"PADDING": f"{__package__}._pad_labels:padding"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest transformers in use reads the attention mask; no release so far does",
    contested="upstream's issue is open since 2023, and a pull request that only warns was closed",
    conditions=(Condition(_TARGET),),
)
