"""slime on Megatron: log-probabilities and entropies in one pass, and no copy of the logits."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Replace, Variant, Wrap

_FUNCTIONS = "slime.utils.ppo_utils"
_BOTH = "calculate_log_probs_and_entropy"
_OURS = f"{__package__}._logits"

_EACH = (
    Replace(
        target=f"{_FUNCTIONS}:compute_log_probs",
        implementation=f"{_OURS}:compute_log_probs",
        fingerprints={"3392a5db12e21a70": "0.1.0 to 0.3.0"},
    ),
    Replace(
        target=f"{_FUNCTIONS}:compute_entropy_from_logits",
        implementation=f"{_OURS}:compute_entropy_from_logits",
        fingerprints={"08f9280d53e3c48f": "0.1.0 to 0.3.0"},
    ),
)

PATCH = Patch(
    name="slime-logprob-entropy",
    summary="log-probabilities and entropies on Megatron need no copy of the logits, and 2 collectives",
    harm="memory",
    bug="log-probabilities and entropies allocate tensors of the size of the logits, and run many collectives",
    when="long sequences, in particular with entropies",
    symptom="""\
slime runs out of CUDA memory when it computes log-probabilities or the loss, at sequence lengths for which the model
itself has memory left, in particular with entropies. `--log-probs-chunk-size` helps in forward and not in backward.""",
    cause="""\
Until 0.3.0, log-probabilities come from Megatron's fused cross entropy, which writes into fp32 logits. Therefore
`calculate_log_probs_and_entropy` clones the logits, once for log-probabilities and once for entropies. A softmax of
each clone is kept for backward, where the fused function rounds its gradient to bfloat16. Since 0.3.1, slime's own
function computes both from one softmax, which it keeps; with the entropy loss, it allocates two more tensors of that
size in backward. There are two to five collectives, or as many for each chunk. The backward of each chunk's slice
allocates a tensor of the size of all logits.""",
    repair="""\
Both come from one pass over the logits, one block of tokens at a time, with one all-reduce of the maxima and one of all
sums for any number of chunks. Nothing is cloned. The logits and a few numbers per token are saved. Backward needs no
collective. It writes the gradient over the logits if nothing else can ever read them again, otherwise into one tensor
of the logits' dtype. [Why that is exact, and when it is refused](../logprob-in-place.md#slime). Until 0.2.4, slime
passes each sample's part of the logits to a separate call: all but one of those gradients need a tensor of that part.
[Where results differ](../logprob-in-place.md#slime).

The patch does not change log-probabilities among the tokens that top-p keeps (`log_prob_keep_mask`, 0.3.1).""",
    references=(
        "https://github.com/THUDM/slime/blob/v0.3.1/slime/utils/ppo_utils.py",
        "https://github.com/NVIDIA/Megatron-LM/issues/1594",
    ),
    # The tag v0.1.0 has version 0.0.1 in its metadata, v0.2.4 0.2.3; main still had 0.3.1 on 2026-08-21.
    variants=(
        Variant(
            Guard("slime", "==0.0.1"),
            (
                *_EACH,
                Replace(
                    target=f"slime.backends.megatron_utils.loss:{_BOTH}",
                    implementation=f"{_OURS}:of_megatrons_group",
                    fingerprints={"c8a87c3dc51c349d": "0.1.0"},
                ),
            ),
        ),
        Variant(
            Guard("slime", ">=0.2.0,<=0.2.1"),
            (
                *_EACH,
                Replace(
                    target=f"{_FUNCTIONS}:{_BOTH}",
                    implementation=f"{_OURS}:whole",
                    fingerprints={"5d02e560bd06e037": "0.2.0 to 0.2.1"},
                ),
            ),
        ),
        Variant(
            Guard("slime", ">=0.2.2,<=0.3.0"),
            (
                *_EACH,
                Replace(
                    target=f"{_FUNCTIONS}:{_BOTH}",
                    implementation=f"{_OURS}:in_chunks",
                    fingerprints={
                        "934707a2fe435bbc": "0.2.2 to 0.2.4",
                        "4fb6b0a82c13d6a3": "0.3.0: the entropy first",
                    },
                ),
            ),
        ),
        Variant(
            Guard("slime", "==0.3.1"),
            (
                Wrap(
                    target=f"{_FUNCTIONS}:{_BOTH}",
                    implementation=f"{_OURS}:around_masked",
                    fingerprints={"4f7a5158d613d35c": "0.3.1, main: one softmax, and top-p"},
                ),
            ),
        ),
    ),
    observations="rlhf_patches.patches._vocab_parallel.counters:observed",
    obsolete_when="when slime computes both without a softmax of all logits; 0.3.1, the newest, does not",
)
