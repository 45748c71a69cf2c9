"""transformers: packed documents attend to each other in gpt-oss and AFMoE."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss:GptOssModel.forward"
_AFMOE = "transformers.models.afmoe.modeling_afmoe:AfmoeModel.forward"
# The whole of it: a release that has "position_ids" there is repaired.
_KEYWORDS = """{
    "config": self.config,
    "inputs_embeds": inputs_embeds,
    "attention_mask": attention_mask,
    "past_key_values": past_key_values,
}"""
_SINCE_5_24 = _KEYWORDS.replace("past_key_values", "cache")
_BEFORE_5_4 = _KEYWORDS.replace('"past_key', '"cache_position": cache_position,\n    "past_key')
_BEFORE_5_2 = _BEFORE_5_4.replace('"inputs_embeds"', '"input_embeds"')


def _masked(keywords: str, *targets: str) -> tuple[Rewrite, ...]:
    """Both masks of each, from the positions that were given: those that the model makes itself are of no packing."""
    masks = [
        Rewrite(
            target=target,
            pattern=f"{function}(**mask_kwargs)",
            replacement=f"{function}(**mask_kwargs, position_ids=$DOCUMENTS(given_positions))",
            alongside=(f"mask_kwargs = {keywords}",),
            uses={"DOCUMENTS": f"{__package__}._document_positions:documents"},
        )
        for target in targets
        for function in ("create_causal_mask", "create_sliding_window_causal_mask")
    ]
    given = [Rewrite(target, "position_ids is None", "(given_positions := position_ids) is None") for target in targets]
    return (*masks, *given)


PATCH = Patch(
    name="transformers-packed-documents",
    summary="packed documents do not see each other in gpt-oss and AFMoE",
    harm="wrong gradient",
    bug="tokens attend to the documents that are packed before theirs",
    when="gpt-oss, AFMoE; packing or padding-free batches; attention other than FlashAttention",
    symptom="""\
gpt-oss or AFMoE is trained on packed rows or padding-free batches (TRL's `packing`, `padding_free`,
`DataCollatorWithFlattening`) with eager, SDPA or flex attention. Every token attends to all documents before its own in
the row, so the loss and every gradient depend on which documents happen to be packed together. No error; the loss is
off by a percent, the gradient by a third and more.""",
    cause="""\
Packed rows have no attention mask; what tells documents apart is that `position_ids` begin again at 0.
`create_causal_mask` and `create_sliding_window_causal_mask` look at these, if the model hands them over, as Llama does.
`GptOssModel` and `AfmoeModel` do not.""",
    repair="""\
Both masks are made with positions that begin at 0 where `position_ids` are 0: those that packing has made. The logits
and gradients of a document are then those of the document alone.

Rows with an attention mask, any call with a cache, generation among them, rows that are not packed, and positions that
jump to anything but 0 stay bit for bit what they are. FlashAttention tells documents apart by itself.

Not repaired: a mask of ones beside packed rows, and `use_cache=True` without a cache, with which transformers looks at
no model's positions (`Trainer` and TRL switch it off).""",
    references=("https://github.com/huggingface/transformers/pull/39997",),
    variants=(
        Variant(Guard("transformers", ">=4.55.0,<=4.57.6"), _masked(_BEFORE_5_2, _GPT_OSS)),
        Variant(Guard("transformers", ">=5.0.0rc0,<5.2.0"), _masked(_BEFORE_5_2, _GPT_OSS, _AFMOE), independent=True),
        Variant(Guard("transformers", ">=5.2.0,<5.4.0"), _masked(_BEFORE_5_4, _GPT_OSS, _AFMOE), independent=True),
        Variant(Guard("transformers", ">=5.4.0,<5.24.0"), _masked(_KEYWORDS, _GPT_OSS, _AFMOE), independent=True),
        Variant(Guard("transformers", ">=5.24.0,<=5.24.0"), _masked(_SINCE_5_24, _GPT_OSS, _AFMOE), independent=True),
    ),
    obsolete_when=(
        "when the oldest transformers in use hands position_ids to gpt-oss's masks; none released so far does"
    ),
    changes_numbers="""\
The loss of packed gpt-oss and AFMoE is that of its documents: lower or higher by a percent or so. Checkpoints trained
with the bug have learnt to read documents after others; evaluation on single documents was not affected.""",
    conditions=(
        Condition(
            "transformers.models.gpt_oss.modeling_gpt_oss:GptOssModel.forward", f"{__package__}._conditions:not_packed"
        ),
        Condition(
            "transformers.models.afmoe.modeling_afmoe:AfmoeModel.forward", f"{__package__}._conditions:not_packed"
        ),
    ),
)
