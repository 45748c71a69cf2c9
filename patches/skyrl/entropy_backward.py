"""Entropies over vocabulary-parallel logits: do not modify the logits, and do not save a whole softmax."""

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
    summary="entropies of token distributions save no softmax, and their backward does not overwrite logits in use",
    harm="memory",
    bug="entropies save a softmax of the logits, or overwrite the logits so that backward raises",
    when="the Megatron backend, and entropies of long sequences or use_entropy_loss",
    excluded_by=("trainer.strategy=fsdp|fsdp2",),
    symptom="""\
SkyRL 0.1.0 and 0.2.0, chunked log-probabilities with the entropy loss (`use_entropy_loss`): `RuntimeError: one of the
variables needed for gradient computation has been modified by an inplace operation`. In all releases: the entropy of
long sequences runs out of CUDA memory, with or without the entropy loss. SkyRL 0.4.0 with the entropy loss: out of CUDA
memory in backward, and the time of the backward pass grows with the number of chunks (`vocab_entropy_chunk_size`,
automatic by default).""",
    cause="""\
`_VocabParallelEntropy.backward` of 0.1.0 and 0.2.0 subtracts from the saved logits in place and adds again, which
autograd detects if another function has saved the same logits. In all releases the function computes whole softmaxes,
saves one of them, and needs three collectives. 0.4.0 calls the function once per chunk of the logits, in
`vocab_parallel_entropy` and, for packed sequences, in `vocab_parallel_entropy_weighted_sum`. The backward of each slice
allocates a tensor of the size of all logits, zero except for the chunk.""",
    repair="""\
Forward processes the logits a block of tokens at a time, with two collectives, and saves a few numbers per token.
Backward needs no collective, and writes into the logits only under the same proof as `skyrl-logprob-backward`. Where
log-probabilities of the same logits have been computed just before, as in SkyRL, the entropies are already available:
they need no collective and no memory, and both share one gradient. Sums are in fp32 for any dtype of the logits; the
result's dtype is the logits' dtype, as before. Logits of -inf count as probability 0, where SkyRL's entropy is NaN;
[where else results differ](../logprob-in-place.md#where-results-are-not-upstreams).

The patch computes the entropies of all logits in one call; the blocks are smaller than the chunks of 0.4.0.
`vocab_parallel_entropy_weighted_sum` skips chunks of tokens whose weights are all 0; these chunks do not affect the
result with the patch either.

Before Megatron has a tensor-parallel group, SkyRL's own function runs.""",
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
    obsolete_when="when SkyRL's entropy saves no softmax; 0.4.0, the newest, does",
)
