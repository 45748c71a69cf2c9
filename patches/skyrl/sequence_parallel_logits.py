"""Padding around the model: no loop over the batch, and an explicit error for an output split on the sequence."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Replace, Rewrite, Signature, Variant

_MODULE = "skyrl.backends.skyrl_train.distributed.megatron.megatron_utils"
_PADDING = f"{__package__}._padding"

PATCH = Patch(
    name="skyrl-sequence-parallel-logits",
    summary="padding is removed and restored without a loop over the batch, and split logits raise an explicit error",
    harm="slow",
    bug="removing padding synchronizes the GPU at every row, and backward allocates all logits once per row",
    when="the Megatron backend without sample packing",
    excluded_by=("trainer.strategy=fsdp|fsdp2",),
    symptom="""\
SkyRL with the Megatron backend and without sample packing: each micro-batch waits for the GPU several times per row,
and backward allocates and adds up as many tensors of the size of all logits as the micro-batch has rows. With an output
layer that leaves the sequence split: `IndexError: The shape of the mask [22] at index 0 does not match the shape of the
indexed tensor [11, 32] at index 0`.""",
    cause="""\
`remove_left_padding` and `recover_left_padding` loop over the rows of the batch with boolean masks, each of which
synchronizes the GPU. The backward of each row's index allocates a tensor of zeros of the size of all rows' logits.
`recover_left_padding` assumes that the output has a token for each of the input's.""",
    repair="""\
The patch computes the same numbers, bit for bit, with operations whose number does not depend on the batch. Backward
moves gradients with one copy.

Logits that are split on the sequence raise an explicit error. No model of megatron-core 0.16.1 or Megatron-Bridge 0.3.1
returns such logits: the output layer gathers its input. Unlike upstream's pull request, the patch does not gather the
logits: each rank would have some tokens with another rank's part of the vocabulary, and wrong log-probabilities without
any error. [Why, and what to do instead](../skyrl-split-logits.md).""",
    signatures=(
        Signature(
            "IndexError",
            "does not match the shape of the indexed tensor",
            frames=(f"{_MODULE}:recover_left_padding",),
            specific=False,
        ),
    ),
    references=("https://github.com/NovaSky-AI/SkyRL/pull/1543",),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<=0.4.0"),
            (
                # Upstream computes the padded length above the loop; only `skyrl-fp8-alignment` changes the length.
                Rewrite(
                    target=f"{_MODULE}:remove_left_padding",
                    pattern="""\
for i in range(batch_size):
    if pre_process:
        new_input_ids[i, : seq_lens[i]] = input_ids[i, attention_mask[i]]
    new_attention_mask[i, : seq_lens[i]] = attention_mask[i, attention_mask[i]]
    new_position_ids[i, : seq_lens[i]] = position_ids[i, attention_mask[i]]
""",
                    replacement="""\
moved = ((new_position_ids, position_ids), *([(new_input_ids, input_ids)] if pre_process else []))
$COMPACT(attention_mask, seq_lens, new_attention_mask, *moved)
""",
                    alongside=("seq_lens = attention_mask.sum(dim=1)",),
                    uses={"COMPACT": f"{_PADDING}:compact"},
                ),
                Replace(
                    target=f"{_MODULE}:recover_left_padding",
                    implementation=f"{_PADDING}:recover_left_padding",
                    fingerprints={
                        "e837af2d217eeafb": "0.1.0 to 0.4.0",
                    },
                ),
            ),
        ),
    ),
    obsolete_when="when SkyRL's functions have no loop over the batch; in 0.4.0, the newest, they have one",
)
