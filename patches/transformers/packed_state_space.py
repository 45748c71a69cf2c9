"""transformers: Mamba-2 layers carry their states into the next packed document in Bamba, Falcon-H1 and Nemotron-H."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

from ._document_rewrites import Call, apart

_NAME = "transformers-packed-state-space"
_BAMBA, _FALCON, _NEMOTRON = (
    f"transformers.models.{name}.modeling_{name}:{prefix}"
    for name, prefix in (("bamba", "Bamba"), ("falcon_h1", "FalconH1"), ("nemotron_h", "NemotronH"))
)
_CALLS = (
    Call("mamba2_split_conv1d_scan_combined", "fused"),
    Call("causal_conv1d_fn", "convolution", ("self.conv_kernel_size",)),
    Call("mamba2_chunk_scan", "scan"),
)


def _apart(layer: str, mixer: str, attribute: str, call: str) -> tuple[Rewrite, ...]:
    return apart(_NAME, layer, mixer, attribute, *_CALLS, inside=call)


PATCH = Patch(
    name=_NAME,
    summary="Mamba-2 layers start anew at each packed document in Bamba, Falcon-H1 and Nemotron-H",
    harm="wrong gradient",
    bug="Mamba-2 layers carry their states into the next packed document",
    when="Bamba, Falcon-H1, Nemotron-H; packing or padding-free batches",
    excluded_by=("model_family=qwen2|qwen3|llama|mistral|gemma|gemma2",),
    symptom="""\
Bamba, Falcon-H1 or Nemotron-H is trained on packed rows or padding-free batches: TRL's `packing` and `padding_free`,
`DataCollatorWithFlattening`, OpenRLHF's `packing_samples`. The loss and the gradient of a document depend on the
documents before it in the row. No error; in tiny models the gradient is a third off or more.""",
    cause="""\
`position_ids` that restart at 0 separate packed documents. Attention's mask reads them. The Mamba-2 layers do not:
their convolution and their state run over the whole row. The kernels separate documents only if the batch has
`seq_idx`, which `DataCollatorWithFlattening` makes if asked.""",
    repair="""\
If the `position_ids` of every row rise by one from 0 and some restart at 0, each document's convolution reads zeros
before its first token, and its scan starts from an empty state. Logits and gradients of a document are then those of
the document alone. The scan, and the fused kernel, run once for each document. To have one call of the kernel, let the
collator return `seq_idx` (`return_seq_idx=True`).

Without kernels each document costs at least one chunk (64 to 256 tokens) of time and memory. Tokens at position 0 that
follow each other at a row's end are padding, and count as one document.

Rows with padding in their attention mask, any call with a cache (such as generation), rows that are not packed,
positions that jump to anything but 0, and calls of the kernels with `seq_idx` stay bit for bit what they are.

Not repaired, without a message: releases before 5.15, in which the layers have no function for the scan; Granite 4,
Zamba 2 and Jamba, whose layers get no positions; compiled models (`torch_compile`), exported ones, CUDA graphs, `vmap`
and `make_fx`; a layer with a forward of your own, a wrapped one (activation checkpointing of that layer alone,
`device_map`), and functions of your own, or kernels of the Hub, in place of the convolution or the scan; a cache
together with packed rows (`Trainer` of 5.23 and TRL switch it off); rows that begin within a document; tokens that
your own code splits over ranks. With a mask of ones the attention layers of all releases ignore the documents; the
patch repairs the others.""",
    references=("https://github.com/huggingface/transformers/issues/46093",),
    variants=(
        Variant(
            Guard("transformers", ">=5.15.0,<=5.24.0"),
            (
                *_apart(f"{_BAMBA}DecoderLayer", f"{_BAMBA}Mixer", "self.mamba", "self.mamba($$$)"),
                *_apart(f"{_FALCON}DecoderLayer", f"{_FALCON}Mixer", "self.mamba", "self.mamba($$$)"),
                # The call without keywords is that of an MLP.
                *_apart(
                    f"{_NEMOTRON}Block", f"{_NEMOTRON}Mamba2Mixer", "self.mixer", "self.mixer(hidden_states, $A, $$$)"
                ),
            ),
            independent=True,
        ),
    ),
    obsolete_when="when the oldest transformers in use separates documents in Mamba-2 layers; no release so far does",
    changes_numbers="""\
With the patch, the loss of packed Bamba, Falcon-H1 and Nemotron-H is that of the single documents. Checkpoints trained
with the bug have learned to read documents with the states of others. Evaluation on single documents was not affected.\
""",
    conditions=(
        Condition(f"{_BAMBA}DecoderLayer.forward", f"{__package__}._conditions:not_mamba"),
        Condition(f"{_FALCON}DecoderLayer.forward", f"{__package__}._conditions:not_mamba"),
        Condition(f"{_NEMOTRON}Block.forward", f"{__package__}._conditions:not_mamba"),
    ),
)
