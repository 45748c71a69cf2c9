"""SFT on flattened batches: no example ends with the next one's first token."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "trl.trainer.sft_trainer:DataCollatorForLanguageModeling.torch_call"
_FIXED = 'output["labels"][output["position_ids"] == 0] = -100'

_LABELS = "$LABELS(labels, input_ids, position_ids if self.return_position_ids else None)"


def without_first(labels: list[Any], tokens: list[Any], positions: list[Any] | None) -> Any:
    """The labels of a row, none where positions begin anew: with each example, and each document of a packed row.

    Args:
        labels: of each example, or of the row.
        tokens: likewise. Labels of a data set's own that are other tokens may be shifted already, and stay.
        positions: likewise; None of a trainer without FlashAttention.
    """
    import torch

    row = torch.cat(labels, dim=0)
    if positions is None or bool(((row != -100) & (row != torch.cat(tokens, dim=0))).any()):
        return row
    return row.masked_fill(torch.cat(positions, dim=0) == 0, -100)


def _labels(statement: str) -> Rewrite:
    return Rewrite(
        target=_TARGET,
        pattern=statement.format("torch.cat(labels, dim=0)"),
        replacement=statement.format(_LABELS),
        alongside=("position_ids = [torch.arange(len(ids)) for ids in input_ids]",),
        unless=(_FIXED,),
        uses={"LABELS": f"{__name__}:{without_first.__name__}"},
    )


_WHOLE_MASK = Rewrite(
    target=_TARGET,
    pattern=('pad(attention_mask, padding_value=0, padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of)'),
    replacement=(
        "pad(attention_mask, padding_value=1 if self.padding_free and self.return_position_ids else 0,"
        ' padding_side="right", pad_to_multiple_of=self.pad_to_multiple_of)'
    ),
    alongside=("attention_mask = [torch.cat(attention_mask, dim=0)]",),
    unless=(_FIXED,),
)

PATCH = Patch(
    name="trl-sft-first-label",
    summary="SFT on flattened batches does not train examples to end with the next one's first token",
    harm="wrong gradient",
    bug="the last token of each example is trained to be followed by the first token of the next",
    when="SFTTrainer with FlashAttention, and padding_free or packing (bfd or ffd)",
    excluded_by=("attn_implementation=eager|sdpa|flex_attention",),
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
that they are divided by are those of the examples one by one. In 0.22.2 and 0.23.0 the mask of rows that have
positions and `pad_to_multiple_of` is of ones, as that of rows that are not padded, so positions are what counts; the
padding is in `num_tokens`. Padded batches, completions, and other attention than FlashAttention stay bit for bit
what they are, and so do `labels` of a data set's own, where one of a batch is neither -100 nor the token at its place:
they may be shifted already. Not repaired: `padding_free` and packing without FlashAttention, of which TRL warns, and
whose examples attend to each other in these releases.""",
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
        Variant(Guard("trl", ">=0.22.2,<0.23.1"), (_labels("labels = [{}]"), _WHOLE_MASK)),
    ),
    obsolete_when="when the oldest trl in use is 0.23.1",
    conditions=(
        Condition(
            "trl.trainer.sft_trainer:DataCollatorForLanguageModeling.torch_call", f"{__package__}._conditions:flattened"
        ),
    ),
)
