"""Log-probabilities over a split vocabulary: the gradient that belongs to them."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant, Wrap

_MODULE = "swift.megatron.trainers.vocab_parallel_utils"
_LOGITS = f"{__package__}._logits"


def _log_softmax(target: str) -> tuple[Rewrite, ...]:
    """The changes of a log_softmax over a split vocabulary: a sum with a gradient, and a maximum without one."""
    total = "torch.distributed.all_reduce(sum_exp, op=torch.distributed.ReduceOp.SUM, group=tp_group)"
    maximum = "logits.max(dim=-1, keepdim=True)[0]"
    normalised = "log_softmax = logits - logits_max - torch.log(sum_exp)"
    return (
        Rewrite(
            target=target,
            pattern=total,
            replacement="sum_exp = $SUM_OVER_RANKS(sum_exp, tp_group)",
            alongside=(f"logits_max = {maximum}", "exp_logits = torch.exp(logits - logits_max)", normalised),
            uses={"SUM_OVER_RANKS": f"{_LOGITS}:sum_over_ranks"},
        ),
        Rewrite(
            target=target,
            pattern=maximum,
            replacement="logits.detach().max(dim=-1, keepdim=True)[0]",
            alongside=(total, normalised),
        ),
    )


PATCH = Patch(
    name="swift-vocab-parallel-logprob-gradient",
    summary="GRPO and GKD under tensor parallelism train on the gradient of their own loss",
    harm="wrong gradient",
    bug="the gradient of GRPO and GKD under tensor parallelism is not that of their loss",
    when="megatron rlhf with GRPO or GKD, and tensor parallelism",
    excluded_by=("tensor_model_parallel_size=1",),
    symptom="""\
GRPO or GKD with `megatron rlhf` and tensor parallelism (`--tensor_model_parallel_size 2` or more) does not learn what
the same run learns without, and `grad_norm` depends on the tensor-parallel size. There is no error: the loss, the KL
and the log-probabilities are right. GRPO also runs out of CUDA memory in `vocab_parallel_log_softmax`, which makes
three tensors of the size of the logits.""",
    cause="""\
Each rank's `log_softmax` divides by a sum over all ranks, which `vocab_parallel_log_softmax` gets from
`torch.distributed.all_reduce`. Autograd does not see that: in backward each rank has the part of the gradient that
comes back to itself. A label lies on one rank, so the others lose what the softmax contributes for it; and the maximum,
which should cancel out, puts some of it on the largest logit of each rank.

GKD has it since 3.12.0, as a method of its trainer, for the divergence over the whole vocabulary (not for
`--gkd_logits_topk`); GRPO from 3.12.1 to 4.0.2 where entropies are asked for (`--log_entropy`,
`--top_entropy_quantile` below 1), and from 4.0.3 on in every run. DPO, KTO and SFT take their log-probabilities from
Megatron's cross entropy, which has the right gradient; reference and old log-probabilities have none.""",
    repair="""\
`compute_logps_and_entropy_from_logits`, which GRPO calls, computes log-probabilities and entropies in one pass over the
logits: two collectives forward, none backward, and no memory beside the logits. The gradient is written over the
logits if nothing else can ever look at them again, or else into one tensor of the logits' dtype. [Why that is exact,
and when it is refused](../logprob-in-place.md); [where results
differ](../logprob-in-place.md#where-results-are-not-upstreams).

`vocab_parallel_log_softmax`, which GKD calls, sums over ranks with a gradient, as 4.5.3 does, and takes the maximum
without one. Entropies and divergences are summed as before: what follows them is the same on all ranks, so each rank's
own part of the gradient is what it needs.

Without tensor parallelism ms-swift's own functions run.""",
    changes_numbers="""\
the gradient of GRPO and GKD under tensor parallelism was wrong, by about half of its norm on two ranks, while losses
and log-probabilities were right: GKD since ms-swift 3.12.0, GRPO since 3.12.1 with entropies and since 4.0.3 always.
A run that was trained with it followed another direction with another norm: take its learning rate, clipping and KL
coefficient as untuned, and rather start again from the checkpoint before RL than go on from it. Runs without tensor
parallelism, DPO, KTO and SFT were right.""",
    references=(
        "https://github.com/modelscope/ms-swift/issues/9778",
        "https://github.com/modelscope/ms-swift/pull/9947",
    ),
    variants=(
        Variant(
            Guard("ms-swift", "==3.12.0"),
            _log_softmax("swift.megatron.trainers.gkd_trainer:MegatronGKDTrainer._vocab_parallel_log_softmax"),
        ),
        Variant(
            Guard("ms-swift", ">=3.12.1,<4.5.3"),
            (
                *_log_softmax(f"{_MODULE}:vocab_parallel_log_softmax"),
                Wrap(
                    target=f"{_MODULE}:compute_logps_and_entropy_from_logits",
                    implementation=f"{_LOGITS}:where_the_vocabulary_is_split",
                    fingerprints={"bf7a6f8568ec8ba2": "3.12.1 to 4.5.2"},
                ),
            ),
        ),
    ),
    observations="rlhf_patches.patches._vocab_parallel.counters:observed",
    obsolete_when="when the oldest ms-swift in use is 4.5.3",
)
