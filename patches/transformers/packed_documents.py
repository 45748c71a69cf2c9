"""transformers: packed documents attend to each other in gpt-oss and AFMoE."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss:GptOssModel.forward"
_AFMOE = "transformers.models.afmoe.modeling_afmoe:AfmoeModel.forward"
_FUNCTIONS = ("create_causal_mask", "create_sliding_window_causal_mask")
# The complete call: a release that has "position_ids" in it is repaired.
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
    """Builds both masks from the given positions; positions that the model creates itself indicate no packing."""
    masks = [
        Rewrite(
            target=target,
            pattern=f"{function}(**mask_kwargs)",
            replacement=f"{function}(**$MASKED(mask_kwargs, given_positions, {', '.join(_FUNCTIONS)}))",
            alongside=(f"mask_kwargs = {keywords}",),
            uses={"MASKED": f"{__package__}._document_positions:masked"},
        )
        for target in targets
        for function in _FUNCTIONS
    ]
    given = [Rewrite(target, "position_ids is None", "(given_positions := position_ids) is None") for target in targets]
    return (*masks, *given)


PATCH = Patch(
    name="transformers-packed-documents",
    summary="packed documents do not see each other in gpt-oss and AFMoE",
    harm="wrong gradient",
    bug="tokens attend to the documents that are packed before theirs",
    when="gpt-oss, AFMoE; packing or padding-free batches; attention other than FlashAttention",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral",),
    symptom="""\
gpt-oss or AFMoE is trained on packed rows or padding-free batches (TRL's `packing`, `padding_free`,
`DataCollatorWithFlattening`) with eager, SDPA or flex attention. Every token attends to all documents before its own
in the row, so the loss and every gradient depend on which documents are packed together. No error; the loss is off by
a percent, the gradient by a third or more.""",
    cause="""\
Packed rows have no attention mask; only `position_ids` that restart at 0 separate the documents. `create_causal_mask`
and `create_sliding_window_causal_mask` read these positions if the model passes them on, as Llama does. `GptOssModel`
and `AfmoeModel` do not.""",
    repair="""\
The patch builds both masks with positions that restart at 0 where `position_ids` are 0, as packing does. The logits
and gradients of a document are then those of the document alone.

Rows with an attention mask, any call with a cache (such as generation), rows that are not packed, and positions that
jump to anything but 0 stay bit for bit what they are. FlashAttention separates documents by itself.

Not repaired, without a message: your own function in place of `create_causal_mask` or
`create_sliding_window_causal_mask` (both get the released arguments); a forward that you have copied; your own
attention without a mask function in transformers' registry; a mask of ones together with packed rows; and
`use_cache=True` without a cache, with which transformers ignores every model's positions (`Trainer` of 5.23 and TRL
switch it off; `Trainer` of 4.57 does so with gradient checkpointing).""",
    references=("https://github.com/huggingface/transformers/pull/39997",),
    variants=(
        Variant(Guard("transformers", ">=4.55.0,<=4.57.6"), _masked(_BEFORE_5_2, _GPT_OSS)),
        Variant(Guard("transformers", ">=5.0.0rc0,<5.2.0"), _masked(_BEFORE_5_2, _GPT_OSS, _AFMOE), independent=True),
        Variant(Guard("transformers", ">=5.2.0,<5.4.0"), _masked(_BEFORE_5_4, _GPT_OSS, _AFMOE), independent=True),
        Variant(Guard("transformers", ">=5.4.0,<5.24.0"), _masked(_KEYWORDS, _GPT_OSS, _AFMOE), independent=True),
        Variant(Guard("transformers", ">=5.24.0,<=5.24.0"), _masked(_SINCE_5_24, _GPT_OSS, _AFMOE), independent=True),
    ),
    obsolete_when=(
        "when the oldest transformers in use passes position_ids to gpt-oss's masks; no release so far does"
    ),
    changes_numbers="""\
With the patch, the loss of packed gpt-oss and AFMoE is that of the single documents: lower or higher by a percent or
so. Checkpoints trained with the bug have learned to read documents with other documents before them. Evaluation on
single documents was not affected.""",
    conditions=(
        Condition(
            "transformers.models.gpt_oss.modeling_gpt_oss:GptOssModel.forward", f"{__package__}._conditions:not_packed"
        ),
        Condition(
            "transformers.models.afmoe.modeling_afmoe:AfmoeModel.forward", f"{__package__}._conditions:not_packed"
        ),
    ),
)
