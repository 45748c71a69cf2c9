"""SFT on flattened batches: no example is trained to predict the next example's first token."""

from __future__ import annotations

from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

NO_PROOF = "a proof needs FlashAttention's kernels on a GPU, which the test replaces"
_TARGET = "trl.trainer.sft_trainer:DataCollatorForLanguageModeling.torch_call"
_FIXED = 'output["labels"][output["position_ids"] == 0] = -100'

_LABELS = "$LABELS(labels, input_ids, position_ids if self.return_position_ids else None)"


def without_first(labels: list[Any], tokens: list[Any], positions: list[Any] | None) -> Any:
    """The labels of a row, masked where positions restart: at each example, and at each document of a packed row.

    Args:
        labels: of each example, or of the row.
        tokens: likewise. Labels that differ from them are a data set's own, which may be shifted already, and stay.
        positions: likewise; None for a trainer without FlashAttention.
    """
    import torch

    row = torch.cat(labels, dim=0)
    if positions is None or bool((row != torch.cat(tokens, dim=0)).any()):
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
    summary="SFT on flattened batches does not train examples to predict the next example's first token",
    harm="wrong gradient",
    bug="the last token of each example is trained to predict the first token of the next example",
    when="SFTTrainer with FlashAttention, and padding_free or packing (bfd or ffd)",
    excluded_by=("attn_implementation=eager|sdpa|flex_attention", "trl=dpo|grpo|kto|reward|rloo"),
    symptom="""\
`SFTTrainer` with FlashAttention and `padding_free=True`, or `packing=True` with its default strategy, on language
modeling data: loss and gradient include one extra target per example or document, the first token of whatever follows
in the batch. The effect grows as examples get shorter; if all examples begin with the same token, the model soon learns
to predict it after each end. In 0.22.2 and 0.23.0 with `padding_free` and `pad_to_multiple_of`, examples also attend to
the examples before them. No error. Prompt-completion data is not affected, unless `completion_only_loss=False`, or the
`completion_mask` of an example's first token is 1.""",
    cause="""\
The collator concatenates all examples of a batch into one row. The labels of that row are its tokens, including the
first token of each example, and a causal model's loss compares each token's prediction with the next label. In 0.22.2
and 0.23.0 the mask is zero where the row is padded; if the mask contains zeros, transformers splits the row by the
mask and not by the positions.""",
    repair="""\
In such rows the patch sets the labels to -100 where positions restart, as 0.23.1 does. Loss, gradient and the number of
tokens that divides them then equal those of the separate examples. In 0.22.2 and 0.23.0 the patch sets the mask of rows
with positions and `pad_to_multiple_of` to ones, as for rows without padding, so the positions decide; `num_tokens`
includes the padding. Padded batches, completions that follow a prompt (unless `completion_only_loss=False`), and
attention other than FlashAttention stay bit for bit identical. So do a data set's own `labels`, if any of them differs
from the token at its place: they may be shifted already. Not repaired: `padding_free` and packing without
FlashAttention. With these settings examples attend to each other in these releases, and TRL warns.""",
    changes_numbers="""\
Since TRL 0.19.0, SFT with FlashAttention, and padding_free or packing, trained on one wrong target per document. With
the patch loss and gradient are means over different tokens, and are not comparable with earlier values; a resumed run
continues with the new ones.""",
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
