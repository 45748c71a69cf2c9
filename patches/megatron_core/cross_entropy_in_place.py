"""Megatron's two cross entropies do not change the caller's logits, and keep no softmax for backward."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant, Wrap

_CROSS_ENTROPY = "megatron.core.tensor_parallel.cross_entropy"
_FUSED = "megatron.core.fusions.fused_cross_entropy"
_CALLS = f"{__package__}._cross_entropy_calls"

PATCH = Patch(
    name="megatron-core-cross-entropy-in-place",
    summary="the cross entropy over a split vocabulary does not change the logits, and keeps no softmax of them",
    harm="wrong data",
    bug="the cross entropy over a split vocabulary overwrites float32 logits or keeps a float32 softmax of bf16 ones",
    when="logits that are read after vocab_parallel_cross_entropy, or long sequences",
    symptom="""\
`vocab_parallel_cross_entropy` and `fused_vocab_parallel_cross_entropy` overwrite float32 logits. Entropies, top-k, or
anything else that is computed from the logits afterwards is wrong, without an error. Code that accounts for it clones
the logits, the largest tensor of a training step. With bfloat16 logits, both functions keep a float32 softmax until
backward, which runs out of CUDA memory with long sequences. The fused function (`--cross-entropy-loss-fusion`) rounds
gradients to bfloat16 for logits of any dtype.""",
    cause="""\
`VocabParallelCrossEntropy.calculate_logits_max` calls `.float()`, which copies nothing if the logits are float32
already. The code after it subtracts, exponentiates and divides in place. The result, a float32 softmax of all logits,
is saved for backward. `calculate_gradients` of the fused function ends with a cast to bfloat16.""",
    repair="""\
Both functions compute losses for one block of tokens at a time, with two all-reduces, and save a few numbers per token.
Backward needs no collective. It writes into the logits only if it can prove that nothing else reads them ([why, and
when it does not](../logprob-in-place.md)). Gradients are computed in float32 and rounded once, to the logits' dtype.
Losses are bitwise identical to upstream's on one and two ranks, and equal up to float32 rounding elsewhere.

The logits are saved until backward. Code that changes them before backward gets autograd's error, while Megatron's own
softmax of bfloat16 logits would not detect the change. Code that changes them without autograd (`logits.data.add_(1)`)
gets a wrong gradient.

Label smoothing uses Megatron's computation, on a copy: `.float()` becomes a call that always copies, also for direct
callers of `VocabParallelCrossEntropy`. The same applies to a target with another shape than the losses, and to integer
logits. In a region of torch.compile, Megatron's own code is traced, with that copy.""",
    references=("https://github.com/NVIDIA/Megatron-LM/issues/1594",),
    # main had version 0.20.0 on 2026-08-22, and had the defect; the newest tag was core_v0.19.0.
    variants=(
        Variant(
            Guard("megatron-core", ">=0.8.0,<=0.20.0"),
            (
                Rewrite(
                    target=f"{_CROSS_ENTROPY}:VocabParallelCrossEntropy.calculate_logits_max",
                    pattern="vocab_parallel_logits.float()",
                    inside="vocab_parallel_logits = vocab_parallel_logits.float()",
                    replacement="vocab_parallel_logits.to(torch.float32, copy=True)",
                ),
                Wrap(
                    target=f"{_CROSS_ENTROPY}:vocab_parallel_cross_entropy",
                    implementation=f"{_CALLS}:around_cross_entropy",
                    fingerprints={
                        "50864f7c691fa666": "0.8.0 to 0.18.2",
                        "51102bbff4a06d89": "0.19.0 to 0.19.2, main: with tp_group",
                    },
                ),
                Wrap(
                    target=f"{_FUSED}:fused_vocab_parallel_cross_entropy",
                    implementation=f"{_CALLS}:around_fused",
                    fingerprints={
                        "0d9357c7147e6bfc": "0.8.0 to 0.11.0",
                        "95171d8f1190d494": "0.12.0rc2 to 0.19.2, main: with tp_group",
                    },
                ),
            ),
            independent=True,
        ),
    ),
    obsolete_when="when Megatron's cross entropies neither write into the logits nor keep a softmax; none so far does",
    observations="rlhf_patches.patches._vocab_parallel.counters:observed",
)
