"""SFT on flattened batches: no example ends with the next one's first token."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "trl.trainer.sft_trainer:DataCollatorForLanguageModeling.torch_call"
_FIXED = 'output["labels"][output["position_ids"] == 0] = -100'
_MASK = '"seq_lengths" in examples[0] and self.padding_free'

# Positions begin anew with each example, and with each document of a packed row.
_LABELS = (
    "(torch.cat(labels, dim=0).masked_fill(torch.cat(position_ids, dim=0) == 0, -100)"
    " if self.return_position_ids else torch.cat(labels, dim=0))"
)


def _labels(statement: str) -> Rewrite:
    return Rewrite(
        target=_TARGET,
        pattern=statement.format("torch.cat(labels, dim=0)"),
        replacement=statement.format(_LABELS),
        alongside=("position_ids = [torch.arange(len(ids)) for ids in input_ids]",),
        unless=(_FIXED,),
    )


_NO_MASK = Rewrite(
    target=_TARGET,
    pattern=f"has_packed_position_ids = self.return_position_ids and {_MASK}",
    replacement="has_packed_position_ids = self.return_position_ids and self.padding_free",
    alongside=("attention_mask = [torch.cat(attention_mask, dim=0)]",),
    unless=(_FIXED,),
)

PATCH = Patch(
    name="trl-sft-first-label",
    summary="SFT on flattened batches does not train examples to end with the next one's first token",
    harm="wrong gradient",
    bug="the last token of each example is trained to be followed by the first token of the next",
    when="SFTTrainer with FlashAttention, and padding_free or packing (bfd or ffd)",
    never_with=("attn_implementation=eager|sdpa|flex_attention",),
    symptom="""\
`SFTTrainer` with FlashAttention and `padding_free=True`, or `packing=True` with its default strategy, on language
modelling data: loss and gradient have one target too many for each example or document, the first token of whatever
stands next in the batch. The shorter they are, the more; where all begin alike it is soon learned. In 0.22.2 and 0.23.0
`padding_free` with `pad_to_multiple_of` has examples attend to those before them as well. No error. Prompts with
completions are right.""",
    cause="""\
All examples of a batch become one row. The labels of that row are its tokens, the first one of each example among them,
and a causal model's loss holds each token's prediction against the label of the next. The mask of 0.22.2 and 0.23.0 has
zeros where the row is padded, and where there are any transformers cuts the row by them and not by the positions.""",
    repair="""\
In such rows the labels where positions begin anew are -100, as in 0.23.1, so loss, gradient and the number of tokens
that they are divided by are those of the examples one by one. In 0.22.2 and 0.23.0 rows that have positions have no
mask; one of ones did nothing. Padded batches, completions, and other attention than FlashAttention stay bit for bit
what they are. Not repaired: `padding_free` and packing without FlashAttention, of which TRL warns, and whose examples
attend to each other in these releases.""",
    changes_numbers="""\
Since TRL 0.19.0 SFT with FlashAttention, and padding_free or packing, trained one wrong target for each document. With
the patch loss and gradient are means over other tokens, and not to be compared with those before; a run that is
resumed goes on with them.""",
    references=(
        "https://github.com/huggingface/trl/pull/4170",
        "https://github.com/huggingface/transformers/pull/31629",
    ),
    variants=(
        Variant(Guard("trl", ">=0.19.0,<0.22.2"), (_labels('output["labels"] = {}.unsqueeze(0)'),)),
        Variant(Guard("trl", ">=0.22.2,<0.23.1"), (_labels("labels = [{}]"), _NO_MASK)),
    ),
    retire="when the oldest trl in use is 0.23.1",
    conditions=(
        Condition(
            "trl.trainer.sft_trainer:DataCollatorForLanguageModeling.torch_call", f"{__package__}.conditions:flattened"
        ),
    ),
)
