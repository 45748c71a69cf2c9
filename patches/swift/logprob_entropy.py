"""Log-probabilities and entropies in one pass, which leaves the logits as they are."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Variant, Wrap

PATCH = Patch(
    name="swift-logprob-entropy",
    summary="log-probabilities and entropies of GRPO need no memory beside the logits, and leave them as they are",
    harm="memory",
    bug="GRPO's log-probabilities and entropies copy the logits, and change them",
    when="megatron rlhf with GRPO, long sequences, most of all with entropies",
    symptom="""\
GRPO with `megatron rlhf` runs out of CUDA memory in `compute_logps_and_entropy_from_logits`, most of all where
entropies are asked for (`--log_entropy`, `--top_entropy_quantile` below 1), at sequence lengths at which the model
itself has room left. Code of one's own that reads the logits after that function finds other numbers in them, or stops
with "modified by an inplace operation".""",
    cause="""\
For entropies the function makes a whole `log_softmax` of the logits with autograd, which keeps it and the exponentials
it was made of for backward, whether or not the entropies are part of the loss. For log-probabilities it calls
Megatron's cross entropy, which keeps a float32 softmax: made in the logits' own memory if these are float32, which the
function's docstring warns of, and beside them if not.""",
    repair="""\
Both are computed in one pass over the logits: two collectives forward, none backward, and no memory beside the logits
(which float32 logits without entropies did not need before either, at the price of their contents).
The gradient is written over the logits if nothing else can ever look at them again, or else into one tensor of the
logits' dtype. [Why that is exact, and when it is refused](../logprob-in-place.md); [where results
differ](../logprob-in-place.md#where-results-are-not-upstreams). 3.12.1 to 4.5.2 get the same on
two tensor-parallel ranks or more from `swift-vocab-parallel-logprob-gradient`. GKD's divergence is left alone: it takes
512 tokens at a time.""",
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
