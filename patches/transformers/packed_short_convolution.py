"""transformers: LFM2's short convolutions read the last tokens of the packed document before."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from ._document_rewrites import Call, apart

_NAME = "transformers-packed-short-convolution"
_LFM2, _MOE = (
    f"transformers.models.{name}.modeling_{name}:{prefix}"
    for name, prefix in (("lfm2", "Lfm2"), ("lfm2_moe", "Lfm2Moe"))
)
_TWO = (
    Call("causal_conv1d_fn", "convolution", ("self.L_cache",), method="cuda_kernels_forward"),
    Call("self.conv", "convolution", ("self.L_cache",), call="{}(Bx)", method="slow_forward"),
)
_ONE = (Call("causal_conv1d_fn", "convolution", ("self.conv_kernel_size",)),)


def _apart(family: str, calls: tuple[Call, ...]) -> tuple[Rewrite, ...]:
    return apart(_NAME, f"{family}DecoderLayer", f"{family}ShortConv", "self.conv", *calls)


PATCH = Patch(
    name=_NAME,
    summary="LFM2's short convolutions read no tokens of the packed document before",
    harm="wrong gradient",
    bug="short convolutions read the last tokens of the packed document before",
    when="LFM2 (dense, MoE and vision); packing or padding-free batches",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral|gemma|gemma2",),
    symptom="""\
LFM2 is trained on packed rows or padding-free batches: TRL's `packing` and `padding_free`,
`DataCollatorWithFlattening`, OpenRLHF's `packing_samples`. The first tokens of a document depend on the last two of
the document before it in the row. No error. The shorter the documents are, the further off the gradient is: with three
documents of 5 to 9 tokens, the relative error of a gradient is about 1.""",
    cause="""\
`position_ids` that restart at 0 separate packed documents. Attention's mask reads them. The layers of short
convolutions do not. Since 5.9 the kernel separates documents if the batch has `seq_idx`, which
`DataCollatorWithFlattening` makes if asked.""",
    repair="""\
If the `position_ids` of every row rise by one from 0 and some restart at 0, each document's convolution reads zeros
before its first token, in one call for the row. Logits and gradients of a document are then those of the document
alone.

Rows with padding in their attention mask, any call with a cache (such as generation), rows that are not packed,
positions that jump to anything but 0, and calls of the kernel with `seq_idx` stay bit for bit what they are.

Not repaired, without a message: 4.54 to 4.57, in which a layer cannot tell packed rows from padded ones; compiled
models (`torch_compile`), exported ones, CUDA graphs, `vmap` and `make_fx`; a layer with a forward of your own, a
wrapped one (activation checkpointing of that layer alone, `device_map`), and functions of your own, or kernels of the
Hub, in place of the convolution; a cache together with packed rows (`Trainer` of 5.23 and TRL switch it off); rows
that begin within a document; tokens that your own code splits over ranks. With a mask of ones the attention layers of
all releases ignore the documents; the patch repairs the others.""",
    references=("https://github.com/huggingface/transformers/issues/46093",),
    variants=(
        Variant(
            Guard("transformers", ">=5.0.0rc0,<5.15.0"),
            (*_apart(_LFM2, _TWO), *_apart(_MOE, _TWO)),
            independent=True,
        ),
        Variant(
            Guard("transformers", ">=5.15.0,<=5.24.0"),
            (*_apart(_LFM2, _ONE), *_apart(_MOE, _ONE)),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest transformers in use separates documents in short convolutions; no release does",
    changes_numbers="""\
With the patch, the loss of packed LFM2 is that of the single documents. Checkpoints trained with the bug have learned
to begin documents with the last tokens of others. Evaluation on single documents was not affected.""",
    conditions=tuple(
        Condition(f"{family}DecoderLayer.forward", f"{__package__}._conditions:not_convolution")
        for family in (_LFM2, _MOE)
    ),
)
