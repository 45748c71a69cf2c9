"""Log-probabilities and entropies in one pass, which does not change the logits."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Variant, Wrap

PATCH = Patch(
    name="swift-logprob-entropy",
    summary="GRPO's log-probabilities and entropies need no memory except the logits, and do not change them",
    harm="memory",
    bug="GRPO's log-probabilities and entropies copy the logits, and change them",
    when="megatron rlhf with GRPO, long sequences, in particular with entropies",
    symptom="""\
GRPO with `megatron rlhf` runs out of CUDA memory in `compute_logps_and_entropy_from_logits`, in particular with
entropies (`--log_entropy`, `--top_entropy_quantile` below 1), at sequence lengths for which the model itself has memory
left. Your own code that reads the logits after that function gets changed values, or raises "modified by an inplace
operation".""",
    cause="""\
For entropies, the function computes a whole `log_softmax` of the logits with autograd, which keeps it and its
exponentials for backward, even if the entropies are not part of the loss. For log-probabilities, it calls Megatron's
cross entropy, which keeps a float32 softmax. The softmax overwrites float32 logits, as the function's docstring warns,
and is an additional tensor for other dtypes.""",
    repair="""\
Both are computed in one pass over the logits: two collectives in forward, none in backward, and no memory except the
logits. (Float32 logits without entropies needed no more memory before either, but their contents were lost.) The
gradient is written over the logits if nothing else can ever read them again, otherwise into one tensor of the logits'
dtype. [Why that is exact, and when it is refused](../logprob-in-place.md); [where results
differ](../logprob-in-place.md#where-results-are-not-upstreams). On two tensor-parallel ranks or more,
`swift-vocab-parallel-logprob-gradient` does the same for 3.12.1 to 4.5.2. The patch does not change GKD's divergence,
which takes 512 tokens at a time.""",
    references=(
        "https://github.com/modelscope/ms-swift/pull/9947",
        "https://github.com/NVIDIA/Megatron-LM/issues/1594",
    ),
    variants=(
        Variant(
            Guard("ms-swift", ">=4.5.3,<=4.6.0"),
            (
                Wrap(
                    target="swift.megatron.trainers.vocab_parallel_utils:compute_logps_and_entropy_from_logits",
                    implementation=f"{__package__}._logits:logps_and_entropy",
                    fingerprints={"ada6e80039a61548": "4.5.3, 4.6.0"},
                ),
            ),
        ),
    ),
    observations="rlhf_patches.patches._vocab_parallel.counters:observed",
    obsolete_when="when ms-swift keeps no log_softmax for entropies; 4.6.0, the newest, does",
)
