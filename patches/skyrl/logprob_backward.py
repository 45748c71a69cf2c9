"""Token log-probabilities over vocabulary-parallel logits: two collectives in forward, none in backward, no copy."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant, Wrap

_MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
_UPSTREAM = "rlhf_patches.patches._vocab_parallel.upstream"
_CALLS = f"{__package__}._calls"
CHUNKED_BACKWARD = f"{_MODULE}:ChunkedDistributedLogprob.backward"
OF_0_1_AND_0_2 = "a5b2410bc49023b8"
"""The fingerprint in releases whose entropy writes into the logits in backward."""

PATCH = Patch(
    name="skyrl-logprob-backward",
    summary="token log-probabilities need no memory besides the logits in backward, and 2 collectives per call",
    harm="memory",
    bug="token log-probabilities allocate tensors of the size of the logits, and need many collectives",
    when="the Megatron backend and long sequences",
    excluded_by=("trainer.strategy=fsdp|fsdp2",),
    symptom="""\
SkyRL with the Megatron backend runs out of CUDA memory in the backward pass of the loss, or in its forward pass,
at sequence lengths at which the model itself has memory left. That step is slow, and slower with a smaller
`logprobs_chunk_size`. SkyRL 0.1.0 and 0.2.0 with a `chunk_size` and the entropy loss: `RuntimeError: one of the
variables needed for gradient computation has been modified by an inplace operation` (see
`skyrl-entropy-backward`).""",
    cause="""\
`ChunkedDistributedLogprob.backward` computes the softmax a second time, with two all-reduces per chunk after three in
forward. It keeps the fp32 gradient of every chunk and then concatenates them, or writes them into one fp32 tensor
(0.4.0), which autograd finally casts to the logits' dtype. `DistributedLogprob` saves a whole fp32 softmax for
backward, and allocates a whole fp32 gradient there.""",
    repair="""\
Forward needs one all-reduce of the maxima and one of all sums, for the whole call, and saves the logits and a few
numbers per token; backward needs no collective. Backward computes the gradient a block of tokens at a time and writes
it over the logits, if nothing else can read the logits again, or else into one tensor of the logits' dtype. [Why that
is exact, and when it is refused](../logprob-in-place.md). Log-probabilities equal SkyRL's bit for bit on one and two
ranks, and within one unit in the last place on more; [where else results
differ](../logprob-in-place.md#where-results-are-not-upstreams). The patch does not change the callers of these
functions (packing, context parallelism, `inference_only`).

With `skyrl-entropy-backward`, the same pass computes the entropies of the same logits. On SkyRL 0.1.0 and 0.2.0, where
that patch is disabled, `DistributedLogprob` stays as it is: the entropy's backward writes into the logits.""",
    references=(
        "https://github.com/NovaSky-AI/SkyRL/pull/1543",
        "https://github.com/NovaSky-AI/SkyRL/pull/1806",
    ),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<=0.4.0"),
            (
                Wrap(
                    target=f"{_MODULE}:DistributedLogprob.forward",
                    implementation=f"{_CALLS}:around_forward",
                    fingerprints={
                        "d6bb726a08a79a1e": "0.1.0 to 0.4.0",
                    },
                ),
                Wrap(
                    target=f"{_MODULE}:DistributedLogprob.backward",
                    implementation=f"{_UPSTREAM}:around_backward",
                    fingerprints={
                        "e197385d8b4ffc07": "0.1.0 to 0.4.0",
                    },
                ),
                Wrap(
                    target=f"{_MODULE}:ChunkedDistributedLogprob.forward",
                    implementation=f"{_UPSTREAM}:around_chunked_forward",
                    fingerprints={
                        "48a3487a0e970457": "0.1.0 to 0.4.0",
                    },
                ),
                Wrap(
                    target=CHUNKED_BACKWARD,
                    implementation=f"{_UPSTREAM}:around_backward",
                    fingerprints={
                        OF_0_1_AND_0_2: "0.1.0, 0.2.0: every chunk's gradient is kept, one-hot rows",
                        "e2b5ce51e151e079": "0.3.0: the same, without one-hot rows",
                        "cc2da393484c2a50": "0.4.0: one fp32 tensor",
                    },
                ),
                *(
                    Rewrite(
                        target=f"{_MODULE}:{caller}",
                        pattern=f"{function}.apply",
                        replacement=f"$OURS({function})",
                        uses={"OURS": f"{_CALLS}:along_with_entropy"},
                    )
                    for caller in (
                        "from_parallel_logits_to_logprobs",
                        "from_parallel_logits_to_logprobs_packed_sequences",
                    )
                    for function in ("ChunkedDistributedLogprob", "DistributedLogprob")
                ),
            ),
        ),
    ),
    observations="rlhf_patches.patches._vocab_parallel.counters:observed",
    obsolete_when="when SkyRL computes the gradient without a second pass over the ranks; 0.4.0, the newest, does not",
)
