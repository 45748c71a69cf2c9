"""Token log-probabilities over vocabulary-parallel logits: two collectives in forward, none in backward, no copy."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Variant, Wrap

_MODULE = "nemo_rl.distributed.model_utils"
_UPSTREAM = "rlhf_patches.patches._vocab_parallel.upstream"

PATCH = Patch(
    name="nemo-rl-logprob-backward",
    summary="token log-probabilities need no memory besides the logits in backward, and 2 collectives per call",
    harm="memory",
    bug="token log-probabilities allocate tensors of the size of the logits, and need many collectives",
    when="vocabulary or context split over ranks, and long sequences",
    symptom="""\
NeMo-RL runs out of CUDA memory in the backward pass of the loss, or in its forward pass, at sequence lengths at which
the model itself has memory left. That step is slow, and slower with a smaller `logprob_chunk_size`.""",
    cause="""\
`ChunkedDistributedLogprob.backward` computes the softmax a second time, with two all-reduces per chunk after three in
forward. It keeps the fp32 gradient of every chunk and then concatenates them (0.4.0, 0.5.0), or writes them into one
tensor, fp32 (0.6.0) or of the logits' dtype (0.7.0), and allocates int64 one-hot rows, eight bytes for every logit of a
chunk. `DistributedLogprob` saves a whole fp32 softmax for backward, and allocates a whole fp32 gradient there.""",
    repair="""\
Like `skyrl-logprob-backward`: forward needs one all-reduce of the maxima and one of all sums, for the whole call, and
saves the logits and a few numbers per token; backward needs no collective. Backward computes the gradient a block of
tokens at a time and writes it over the logits, if nothing else can read the logits again, or else into one tensor of
the logits' dtype. [Why that is exact, and when it is refused](../logprob-in-place.md); [where results
differ](../logprob-in-place.md#where-results-are-not-upstreams).

The patch does not change `DistributedLogprob` before 0.4.0, which computes in the logits' dtype and so returns other
numbers; the variants with top-k or top-p sampling, which exchange whole rows; the variants for several targets per
token, for hidden states and for soft targets; and `ChunkedDistributedEntropy`.""",
    references=(
        "https://github.com/NVIDIA-NeMo/RL/blob/v0.7.0/nemo_rl/distributed/model_utils.py",
        "https://github.com/NovaSky-AI/SkyRL/pull/1543",
    ),
    # The metadata of the tag v0.5.0 has version 0.5.0rc0; main had 0.6.0 on 2026-08-22, after v0.7.0.
    variants=(
        Variant(
            Guard("nemo-rl", ">=0.4.0,<=0.7.0"),
            (
                Wrap(
                    target=f"{_MODULE}:DistributedLogprob.forward",
                    implementation=f"{_UPSTREAM}:around_forward",
                    fingerprints={
                        "d6bb726a08a79a1e": "0.4.0 to 0.7.0",
                        "f0466427600fa81c": "main: no softmax where inference_only",
                    },
                ),
                Wrap(
                    target=f"{_MODULE}:DistributedLogprob.backward",
                    implementation=f"{_UPSTREAM}:around_backward",
                    fingerprints={
                        "e197385d8b4ffc07": "0.4.0 to 0.7.0, main",
                    },
                ),
                Wrap(
                    target=f"{_MODULE}:ChunkedDistributedLogprob.forward",
                    implementation=f"{_UPSTREAM}:around_chunked_forward",
                    fingerprints={
                        "48a3487a0e970457": "0.4.0 to 0.7.0, main",
                    },
                ),
                Wrap(
                    target=f"{_MODULE}:ChunkedDistributedLogprob.backward",
                    implementation=f"{_UPSTREAM}:around_backward",
                    fingerprints={
                        "a5b2410bc49023b8": "0.4.0, 0.5.0: every chunk's gradient is kept",
                        "4733bab6e4d5d0f9": "0.6.0: one fp32 tensor",
                        "cfe0737e2f86a69a": "0.7.0, main: one of the logits' dtype",
                    },
                ),
            ),
        ),
    ),
    observations="rlhf_patches.patches._vocab_parallel.counters:observed",
    obsolete_when=(
        "when NeMo-RL computes the gradient without a second pass over the ranks; 0.7.0, the newest, does not"
    ),
)
