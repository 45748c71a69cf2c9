"""verl on Megatron: compute log-probabilities and entropies in one pass, without a copy of the logits."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Replace, Rewrite, Variant

_FUNCTIONS = "verl.utils.megatron.tensor_parallel"
_ACTOR = "verl.workers.actor.megatron_actor:MegatronPPOActor.forward_backward_batch"
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_OURS = f"{__package__}._logits"
_SHARED = "rlhf_patches.patches._vocab_parallel"
_ROLL = "torch.roll(label, shifts=-1, dims=1)"

# The autograd function stays, and with it `vocab_parallel_entropy`, which calls it.
_ENTROPY = (
    Replace(
        target=f"{_FUNCTIONS}:_VocabParallelEntropy.forward",
        implementation=f"{_SHARED}.megatron:entropy_forward",
        fingerprints={
            "df930aadbd9eb38b": "0.1rc0 to 0.2.0.post2: three whole tensors",
            "21ebbaf672255f1c": "0.3.0.post0, 0.3.0.post1: two",
            "ac0e650017ca5c17": "0.4.0 to 0.9.1: one",
        },
    ),
    Replace(
        target=f"{_FUNCTIONS}:_VocabParallelEntropy.backward",
        implementation=f"{_SHARED}.upstream:entropy_backward",
        fingerprints={
            "6ae6c7c27b01db7c": "0.1rc0 to 0.3.0.post1",
            "9627b662e0314739": "0.4.0 to 0.9.1: writes into the logits",
        },
    ),
)


def _log_probs(implementation: str, fingerprint: str, releases: str) -> Replace:
    return Replace(
        target=f"{_FUNCTIONS}:vocab_parallel_log_probs_from_logits",
        implementation=f"{_OURS}:{implementation}",
        fingerprints={fingerprint: releases},
    )


# Until 0.3.0 the actor computes log-probabilities first, and then always entropies.
_LOG_PROBS_FIRST = (
    *_ENTROPY,
    _log_probs("log_probs_before_entropy", "0ffd64d4a7df3468", "0.1rc0 to 0.3.0.post1"),
    Replace(
        target=f"{_FUNCTIONS}:vocab_parallel_entropy",
        implementation=f"{_OURS}:entropy",
        fingerprints={"562d8a8c81b9fcbf": "0.1rc0 to 0.9.1"},
    ),
)
_ENTROPY_FIRST = (*_ENTROPY, _log_probs("log_probs_from_logits", "0a1125e302a38be2", "0.4.0 to 0.9.1"))


def _one_pass(target: str, *, copy: bool = True, roll: bool = False, chunks: bool = False) -> tuple[Rewrite, ...]:
    """The caller's changes: both quantities where the caller computes the entropy, and no copy of the logits.

    Args:
        target: the function that contains the caller.
        copy: whether the caller clones the logits, as since 0.6.0.
        roll: whether the caller shifts the labels in between, as in the engine of 0.6.
        chunks: whether the caller may compute the entropy in chunks, as since 0.9.0.
    """
    read = "logits_bak" if copy else "logits"
    both = f"(both := $BOTH(logits, {_ROLL if roll else 'label'}))"
    uses = {"BOTH": f"{_OURS}:log_probs_and_entropy"}
    changes = [
        Rewrite(
            target=target,
            pattern="vocab_parallel_entropy(logits)",
            inside="entropy = vocab_parallel_entropy(logits)",
            replacement=f"{both}.entropy",
            alongside=('ret["entropy"] = entropy', *([f"label = {_ROLL}"] if roll else [])),
            unless=() if roll else (f"label = {_ROLL}",),
            uses=uses,
        ),
        Rewrite(
            target=target,
            pattern=f"vocab_parallel_log_probs_from_logits({read}, label)",
            replacement=(
                f"(both.log_probs if calculate_entropy else vocab_parallel_log_probs_from_logits({read}, label))"
            ),
        ),
    ]
    if copy:
        changes.append(
            Rewrite(
                target=target,
                pattern="logits.clone()",
                inside="logits_bak = logits.clone()",
                replacement="logits",
                alongside=("logits_bak = logits",),
            )
        )
    if chunks:
        changes.append(
            Rewrite(
                target=target,
                pattern="vocab_parallel_entropy_with_chunking($$$ARGUMENTS)",
                replacement=f"{both}.entropy.float()",
                uses=uses,
            )
        )
    return tuple(changes)


PATCH = Patch(
    name="verl-logprob-entropy",
    summary="log-probabilities and entropies on Megatron need no copy of the logits and only 2 collectives",
    harm="memory",
    bug="log-probabilities and entropies allocate tensors of the size of the logits, and need many collectives",
    when="Megatron and long sequences; worse with entropies",
    symptom="""\
verl with Megatron runs out of CUDA memory when it computes log-probabilities or the loss, at sequence lengths at which
the model itself has memory left. Entropies need more memory (`entropy_coeff` above 0, and whenever old
log-probabilities are computed). verl 0.4.0 to 0.5.0 with `entropy_coeff` above 0 and logits in fp32, and verl 0.9.0,
0.9.1 with `entropy_coeff` above 0 and `entropy_from_logits_with_chunking`: `RuntimeError: one of the variables needed
for gradient computation has been modified by an inplace operation`.""",
    cause="""\
Log-probabilities come from Megatron's cross entropy, which computes a whole softmax in fp32 and saves it for backward.
Where the logits are fp32, as Megatron's `Float16Module` returns them, the cross entropy writes the softmax into the
logits themselves. So a caller that also needs entropies clones the logits first (0.3.0, and 0.6.0 to 0.9.1).
`_VocabParallelEntropy` saves a softmax of its own, and since 0.4.0 writes into the logits in backward, so that other
chunks of the same logits read modified values. Each function needs three collectives.""",
    repair="""\
The patch computes both quantities in one pass over the logits, a block of tokens at a time, with one all-reduce of the
maxima and one of all sums. The forward pass does not modify the logits, so no clone is needed. It saves the logits and
a few numbers per token. Backward needs no collective: it writes the gradient of both quantities over the logits if
nothing else can read them again, or else into one tensor of the logits' dtype. [Why that is exact, and when it is
refused](../logprob-in-place.md). Top-k distillation, which reads the logits in between, reads the original values.
[Where results differ](../logprob-in-place.md#verl).

The patch computes entropies in one call where verl would compute them in chunks (`entropy_from_logits_with_chunking`):
the blocks are smaller. Before 0.3.0 the actor computes entropies after log-probabilities, from logits into which a
current Megatron has already written; with the patch they are the entropies of the original logits.

The patch does not change `vocab_parallel_sum_pi_squared`; the fused kernels (`use_fused_kernels`), which compute no
logits; and the critic, which has no logits.""",
    references=(
        "https://github.com/volcengine/verl/blob/v0.9.1/verl/workers/engine/megatron/transformer_impl.py",
        "https://github.com/NVIDIA/Megatron-LM/issues/1594",
    ),
    # Independent: the functions work without their callers' changes, the callers' changes without the functions', and a
    # run has either an actor or an engine.
    variants=(
        Variant(Guard("verl", ">=0.1rc0,<=0.2.0.post2"), _LOG_PROBS_FIRST),
        Variant(
            Guard("verl", ">=0.3.0.post0,<=0.3.0.post1"),
            (
                *_LOG_PROBS_FIRST,
                Rewrite(
                    target=_ACTOR,
                    pattern="logits.clone()",
                    inside="logits_back = logits.clone()",
                    replacement="logits",
                    alongside=(
                        "log_prob = vocab_parallel_log_probs_from_logits(logits, responses)",
                        "logits = logits_back",
                    ),
                ),
            ),
            independent=True,
        ),
        Variant(Guard("verl", ">=0.4.0,<=0.5.0"), (*_ENTROPY_FIRST, *_one_pass(_ACTOR, copy=False)), independent=True),
        Variant(
            Guard("verl", ">=0.6.0,<=0.6.1"),
            (
                *_ENTROPY_FIRST,
                *_one_pass(_ACTOR),
                *_one_pass(f"{_ENGINE}.forward_step", roll=True),
            ),
            independent=True,
        ),
        Variant(
            Guard("verl", ">=0.7.0,<=0.7.1"),
            (*_ENTROPY_FIRST, *_one_pass(_ACTOR), *_one_pass(f"{_ENGINE}.forward_step")),
            independent=True,
        ),
        Variant(
            Guard("verl", ">=0.8.0.dev0,<=0.8.0"),
            (*_ENTROPY_FIRST, *_one_pass(f"{_ENGINE}.forward_step")),
            independent=True,
        ),
        Variant(
            Guard("verl", ">=0.9.0,<=0.9.1"),
            (
                *_ENTROPY_FIRST,
                Replace(
                    target=f"{_FUNCTIONS}:vocab_parallel_entropy_with_chunking",
                    implementation=f"{_OURS}:entropy_with_chunking",
                    fingerprints={"e917e2284ca5cbbe": "0.9.0, 0.9.1"},
                ),
                *_one_pass(f"{_ENGINE}._lm_head_logits_processor", chunks=True),
            ),
            independent=True,
        ),
    ),
    observations="rlhf_patches.patches._vocab_parallel.counters:observed",
    obsolete_when="when verl computes both without a copy of the logits; 0.9.1, the newest, does not",
)
