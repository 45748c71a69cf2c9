"""transformers: linear attention carries its states into the next packed document in Qwen3-Next, Qwen3.5 and others."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from ._document_rewrites import Call, apart

_NAME = "transformers-packed-linear-attention"
_FAMILIES = _NEXT, _QWEN3_5, _MOE = tuple(
    f"transformers.models.{name}.modeling_{name}:{prefix}"
    for name, prefix in (("qwen3_next", "Qwen3Next"), ("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe"))
)
_OLMO = "transformers.models.olmo_hybrid.modeling_olmo_hybrid:OlmoHybrid"
_SIZE = ("self.conv_kernel_size",)
# Before 5.15 a layer has its functions as attributes; since then the module's functions choose a kernel or PyTorch.
_METHODS = (
    Call("self.causal_conv1d_fn", "convolution", _SIZE),
    Call("self.conv1d", "convolution", _SIZE, call="{}(mixed_qkv)"),
    Call("self.chunk_gated_delta_rule", "recurrence"),
)
_FUNCTIONS = (
    Call("causal_conv1d_fn", "convolution", _SIZE),
    Call("torch_chunk_gated_delta_rule", "recurrence"),
)


def _apart(family: str, *calls: Call, kind: str = "") -> tuple[Rewrite, ...]:
    return apart(_NAME, f"{family}{kind}DecoderLayer", f"{family}GatedDeltaNet", "self.linear_attn", *calls)


def _changes(calls: tuple[Call, ...], *families: str) -> tuple[Rewrite, ...]:
    return tuple(change for family in families for change in _apart(family, *calls))


PATCH = Patch(
    name=_NAME,
    summary="linear attention starts anew at each packed document in Qwen3-Next, Qwen3.5 and OLMo Hybrid",
    harm="wrong gradient",
    bug="linear attention carries its states into the next packed document",
    when="Qwen3-Next, Qwen3.5 (dense and MoE), OLMo Hybrid; packing or padding-free batches",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral|gemma|gemma2",),
    symptom="""\
Qwen3-Next, Qwen3.5 or OLMo Hybrid is trained on packed rows or padding-free batches: TRL's `packing` and
`padding_free`, `DataCollatorWithFlattening`, OpenRLHF's `packing_samples`, SkyRL and verl without padding. The loss
and the gradient of a document depend on the documents before it in the row. No error; in tiny models the relative
error of the gradient is about 1.""",
    cause="""\
`position_ids` that restart at 0 separate packed documents. Attention's mask reads them. The layers of linear attention
(three of four) do not: their convolution and their recurrent state run over the whole row. Releases before 5.9 separate
documents in no case. Since 5.9 the kernels do if the batch has `cu_seq_lens_q` and `seq_idx`, which
`DataCollatorWithFlattening` makes only if asked.""",
    repair="""\
If the `position_ids` of every row rise by one from 0 and some restart at 0, each document's convolution reads zeros
before its first token, and its recurrence starts from an empty state. Logits and gradients of a document are then those
of the document alone. Projections and the convolution still run once for the row. The recurrence runs once for each
document, also with kernels. To have one call of the kernel, use a release from 5.9 on, and let the collator return
`cu_seq_lens_q` and `seq_idx` (`return_flash_attn_kwargs=True, return_seq_idx=True`).

Without kernels each document costs at least one chunk (64 to 256 tokens) of time and memory. Tokens at position 0 that
follow each other at a row's end are padding, and count as one document.

Rows with padding in their attention mask, any call with a cache (such as generation), rows that are not packed,
positions that jump to anything but 0, and calls of the kernels with `cu_seq_lens_q` and `seq_idx`
stay bit for bit what they are.

Not repaired, without a message: OLMo Hybrid before 5.15, Kimi Linear and other models; compiled models
(`torch_compile`), exported ones, CUDA graphs, `vmap` and `make_fx`; a layer with a forward of your own, a wrapped one
(activation checkpointing of that layer alone, `device_map`), and functions of your own, or kernels of the Hub, in
place of the convolution or the recurrence; a cache together with packed rows (`Trainer` of 5.23 and TRL switch it off;
`Trainer` of 4.57 does so with gradient checkpointing, so set `use_cache=False`); rows that begin within a document;
tokens that your own code splits over ranks; three planes of positions, unless they are equal; and 5.15 to 5.19 without
kernels if the batch has `cu_seq_lens_q`. With a mask of ones the attention layers of all releases ignore the
documents; the patch repairs the others.""",
    references=("https://github.com/huggingface/transformers/issues/46093",),
    variants=(
        Variant(Guard("transformers", ">=4.57.0,<5.2.0"), _changes(_METHODS, _NEXT)),
        Variant(Guard("transformers", ">=5.2.0,<5.15.0"), _changes(_METHODS, *_FAMILIES), independent=True),
        Variant(
            Guard("transformers", ">=5.15.0,<=5.24.0"),
            (*_changes(_FUNCTIONS, *_FAMILIES), *_apart(_OLMO, *_FUNCTIONS, kind="LinearAttention")),
            independent=True,
        ),
    ),
    obsolete_when=(
        "when the oldest transformers in use separates the documents of linear attention; no release so far does"
    ),
    changes_numbers="""\
With the patch, the loss of packed rows is that of the single documents. Checkpoints trained with the bug have learned
to read documents with the states of others. Evaluation on single documents was not affected.""",
    conditions=tuple(
        Condition(f"{layer}DecoderLayer.forward", f"{__package__}._conditions:not_linear")
        for layer in (*_FAMILIES, f"{_OLMO}LinearAttention")
    ),
)
