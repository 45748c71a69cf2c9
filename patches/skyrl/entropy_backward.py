"""Entropies over vocabulary-parallel logits: the logits stay as they are, and no whole softmax is kept."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Replace, Variant, Wrap

_MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
_CALLS = f"{__package__}._calls"

_BOTH = (
    Replace(
        target=f"{_MODULE}:_VocabParallelEntropy.forward",
        implementation="rlhf_patches.patches._vocab_parallel.megatron:entropy_forward",
        fingerprints={"ac0e650017ca5c17": "0.1.0 to 0.4.0"},
    ),
    Wrap(
        target=f"{_MODULE}:_VocabParallelEntropy.backward",
        implementation="rlhf_patches.patches._vocab_parallel.upstream:around_entropy_backward",
        fingerprints={
            "9627b662e0314739": "0.1.0, 0.2.0: writes into the logits",
            "47c60982d7680560": "0.3.0, 0.4.0",
        },
    ),
)

PATCH = Patch(
    name="skyrl-entropy-backward",
    summary="entropies of token distributions keep no softmax, and their backward leaves the logits alone",
    harm="memory",
    bug="entropies keep a softmax of the logits, or overwrite them so that backward raises",
    when="the Megatron backend, entropies of long sequences or use_entropy_loss",
    excluded_by=("trainer.strategy=fsdp|fsdp2",),
    symptom="""\
SkyRL 0.1.0 and 0.2.0, chunked log-probabilities with the entropy loss (`use_entropy_loss`): `RuntimeError: one of the
variables needed for gradient computation has been modified by an inplace operation`. In all releases: the entropy of
long sequences runs out of CUDA memory, with or without the entropy loss. SkyRL 0.4.0 with the entropy loss: out of CUDA
memory in backward, and the backward pass takes the longer the more chunks there are (`vocab_entropy_chunk_size`,
automatic by default).""",
    cause="""\
`_VocabParallelEntropy.backward` of 0.1.0 and 0.2.0 subtracts from the saved logits in place and adds again, which
autograd notices if another function has saved the same logits. In all releases the function makes whole softmaxes,
saves one of them, and needs three collectives. 0.4.0 gives each chunk of the logits to a call of its own, in
`vocab_parallel_entropy` and, for packed sequences, in `vocab_parallel_entropy_weighted_sum`. The backward of each slice
makes a tensor of the size of all logits, zero but for the chunk.""",
    repair="""\
Forward works through the logits a block of tokens at a time, with two collectives, and saves a few numbers per token;
backward needs no collective, and writes into the logits only under the same proof as `skyrl-logprob-backward`. Where
log-probabilities of the same logits have been computed just before, as SkyRL does it, the entropies are there already:
no collective and no memory, and one gradient for both. Sums are in fp32 whatever the logits' dtype, which is the
result's dtype as before. Logits of -inf count as probability 0, where SkyRL's entropy is NaN;
[where else results differ](../logprob-in-place.md#where-results-are-not-upstreams).

The entropies of all logits are computed in one call; the blocks are smaller than the chunks of 0.4.0. What its
`vocab_parallel_entropy_weighted_sum` does not look at, chunks of tokens whose weights are all 0, shows in no result
here either.

Before Megatron has a tensor-parallel group, SkyRL's own function answers.""",
    references=("https://github.com/NovaSky-AI/SkyRL/pull/1543",),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0,<=0.3.0"),
            (
                *_BOTH,
                Wrap(
                    target=f"{_MODULE}:vocab_parallel_entropy",
                    implementation=f"{_CALLS}:around_entropy",
                    fingerprints={"562d8a8c81b9fcbf": "0.1.0 to 0.3.0"},
                ),
            ),
        ),
        Variant(
            Guard("skyrl", "==0.4.0"),
            (
                *_BOTH,
                Wrap(
                    target=f"{_MODULE}:vocab_parallel_entropy",
                    implementation=f"{_CALLS}:around_entropy",
                    fingerprints={"d577d188ff06bf59": "0.4.0: in chunks"},
                ),
                Wrap(
                    target=f"{_MODULE}:vocab_parallel_entropy_weighted_sum",
                    implementation=f"{_CALLS}:around_weighted_entropy",
                    fingerprints={"0c0405122aa71cf6": "0.4.0: in chunks, for packed sequences"},
                ),
            ),
        ),
    ),
    obsolete_when="when SkyRL's entropy keeps no softmax; 0.4.0, the newest, does",
)
