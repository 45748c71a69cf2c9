"""Padding around the model: no loop over the batch, and an output that is split on the sequence is named as such."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Replace, Rewrite, Signature, Variant

_MODULE = "skyrl.backends.skyrl_train.distributed.megatron.megatron_utils"
_PADDING = f"{__package__}._padding"

PATCH = Patch(
    name="skyrl-sequence-parallel-logits",
    summary="padding is removed and restored without a loop over the batch, and split logits are refused by name",
    harm="slow",
    bug="removing padding waits for the GPU at every row, and allocates all logits once per row in backward",
    when="the Megatron backend without sample packing",
    excluded_by=("trainer.strategy=fsdp|fsdp2",),
    symptom="""\
SkyRL with the Megatron backend and without sample packing: each micro-batch waits for the GPU several times per row,
and backward allocates and adds up as many tensors of the size of all logits as the micro-batch has rows. With an output
layer that leaves the sequence split: `IndexError: The shape of the mask [22] at index 0 does not match the shape of the
indexed tensor [11, 32] at index 0`.""",
    cause="""\
`remove_left_padding` and `recover_left_padding` go through the batch row by row, with boolean masks, each of which is a
synchronisation on a GPU. The backward of each row's index makes a tensor of zeros of the size of all rows' logits. And
`recover_left_padding` takes it for granted that the output has a token for each of the input's.""",
    repair="""\
The same numbers, bit for bit, from operations whose number does not depend on the batch. Gradients are moved back with
one copy.

Logits that are split on the sequence are refused with an error that says so. No model of megatron-core 0.16.1 or
Megatron-Bridge 0.3.1 makes them: the output layer gathers its input. They are not gathered as upstream's pull request
does it: each rank would have some tokens with another rank's part of the vocabulary, and wrong log-probabilities
without any error. [Why, and what to do instead](../skyrl-split-logits.md).""",
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
                # The padded length is computed above the loop, and left alone: `skyrl-fp8-alignment` is about that.
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
    obsolete_when="when SkyRL's functions have no loop over the batch; those of 0.4.0, the newest, have",
)
