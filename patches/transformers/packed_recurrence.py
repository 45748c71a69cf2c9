"""An advice for recurrent models that nothing repairs, such as Granite 4: packed documents affect each other."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_COMPUTE_LOSS = "transformers.trainer:Trainer.compute_loss"

ADVICE = Advice(
    name="transformers-packed-recurrence",
    summary="packed documents affect each other in Granite 4, Jamba, Zamba 2, LFM3, MiniMax and other recurrent models",
    harm="wrong gradient",
    bug="a packed document begins with the states that the previous one left",
    when="Granite 4 (hybrid), Jamba, Zamba 2, MiniMax, LFM3, Kimi Linear, RecurrentGemma ...; packing or padding-free",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral|gemma|gemma2",),
    symptom="""\
One of these models is trained on packed rows or padding-free batches: TRL's `packing` and `padding_free`,
`DataCollatorWithFlattening`, `use_remove_padding` of verl. The loss and the gradient of a document depend on the
documents before it in the row. No error. In tiny models the logits of the later documents are 19 to 93 percent off:

| model | logits off |
| --- | --- |
| Granite 4 hybrid (`GraniteMoeHybrid`) | 0.78 |
| Jamba, Zamba 2 | 0.88, 0.87 |
| Kimi Linear, Bailing hybrid | 0.93, 0.80 |
| LFM3, Qwen4Exp | 0.88, 0.76 |
| MiniMax, Zaya, Inkling, Inkling 2 | 0.45, 0.48, 0.51, 0.33 |
| RecurrentGemma | 0.19 |""",
    cause="""\
`position_ids` that restart at 0 separate packed documents. Attention's mask reads them. The recurrent layers and the
short convolutions of these models do not get them, so their states run over the whole row.""",
    what_to_do="""\
Train these models without `packing` and `padding_free`, one document in a row. With Mamba-2 kernels, Granite 4 and
Zamba 2 separate documents if the batch has `seq_idx` (`DataCollatorWithFlattening(return_seq_idx=True)`).
`rlhf-patches rehearse` measures it on your model: per-document gradients.

The patches `transformers-packed-linear-attention`, `transformers-packed-state-space` and
`transformers-packed-short-convolution` repair Qwen3-Next, Qwen3.5, OLMo hybrid, Bamba, Falcon-H1, Nemotron-H and LFM2.
They do not reach the layers of this advice, which get no positions.

The process logs this when `Trainer`, or a trainer on it, computes a loss of such a model and its collator joins several
rows into one. Mamba and Mamba-2, xLSTM and RWKV take no positions at all, and have the same bug.""",
    references=("https://github.com/huggingface/transformers/issues/46093",),
    variants=(
        Variant(Guard("transformers", ">=4.57.0,<=5.24.0"), (Shape(_COMPUTE_LOSS, "outputs = model(**inputs)"),)),
    ),
    obsolete_when="when the oldest transformers in use separates documents in all recurrent layers; 5.24.0 does not",
    conditions=(Condition(_COMPUTE_LOSS, f"{__package__}._recurrent_families:joins_documents"),),
)
