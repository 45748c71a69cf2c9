"""Log-probabilities over a split vocabulary: the gradient of the loss."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant, Wrap

_MODULE = "swift.megatron.trainers.vocab_parallel_utils"
_LOGITS = f"{__package__}._logits"


_GKD = "swift.megatron.trainers.gkd_trainer:MegatronGKDTrainer._vocab_parallel_log_softmax"


def has_a_gradient_of_parts(logits: Any) -> bool | None:
    """Whether autograd records what is computed from a rank's part of the logits; None if that is unknown."""
    needs, torch = getattr(logits, "requires_grad", None), sys.modules.get("torch")
    ranks = _ranks()
    if needs is False or ranks == 1:
        return False
    if needs is None or ranks is None or torch is None:
        return None
    return bool(torch.is_grad_enabled())


def _ranks() -> int | None:
    """The number of tensor-parallel ranks."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return int(state.get_tensor_model_parallel_world_size())


def _log_softmax(target: str) -> tuple[Rewrite, ...]:
    """The changes of a log_softmax over a split vocabulary: a sum with a gradient, and a maximum without one."""
    total = "torch.distributed.all_reduce(sum_exp, op=torch.distributed.ReduceOp.SUM, group=tp_group)"
    maximum = "logits.max(dim=-1, keepdim=True)[0]"
    normalized = "log_softmax = logits - logits_max - torch.log(sum_exp)"
    return (
        Rewrite(
            target=target,
            pattern=total,
            replacement="sum_exp = $SUM_OVER_RANKS(sum_exp, tp_group)",
            alongside=(f"logits_max = {maximum}", "exp_logits = torch.exp(logits - logits_max)", normalized),
            uses={"SUM_OVER_RANKS": f"{_LOGITS}:sum_over_ranks"},
        ),
        Rewrite(
            target=target,
            pattern=maximum,
            replacement="logits.detach().max(dim=-1, keepdim=True)[0]",
            alongside=(total, normalized),
        ),
    )


PATCH = Patch(
    name="swift-vocab-parallel-logprob-gradient",
    summary="GRPO and GKD under tensor parallelism train on the gradient of their own loss",
    harm="wrong gradient",
    bug="under tensor parallelism, the gradient of GRPO and GKD is not that of their loss",
    when="megatron rlhf with GRPO or GKD, and tensor parallelism",
    excluded_by=("tensor_model_parallel_size=1",),
    symptom="""\
GRPO or GKD with `megatron rlhf` and tensor parallelism (`--tensor_model_parallel_size 2` or more) does not learn the
same as without, and `grad_norm` depends on the tensor-parallel size. No error is raised: the loss, the KL and the
log-probabilities are right. GRPO also runs out of CUDA memory in `vocab_parallel_log_softmax`, which allocates three
tensors of the size of the logits.""",
    cause="""\
Each rank's `log_softmax` divides by a sum over all ranks, which `vocab_parallel_log_softmax` computes with
`torch.distributed.all_reduce`. Autograd does not record it: in backward, each rank has only its own part of the
gradient. A label is on one rank, so the other ranks lose the softmax's contribution for it. The maximum, which should
cancel out, adds some of it to the largest logit of each rank.

GKD has the bug since 3.12.0, as a method of its trainer, for the divergence over the whole vocabulary (not for
`--gkd_logits_topk`). GRPO has it from 3.12.1 to 4.0.2 with entropies (`--log_entropy`, `--top_entropy_quantile` below
1), and since 4.0.3 in every run. DPO, KTO and SFT use the log-probabilities of Megatron's cross entropy, which has the
right gradient. Reference and old log-probabilities have no gradient.""",
    repair="""\
`compute_logps_and_entropy_from_logits`, which GRPO calls, computes log-probabilities and entropies in one pass over the
logits: two collectives in forward, none in backward, and no memory except the logits. The gradient is written over the
logits if nothing else can ever read them again, otherwise into one tensor of the logits' dtype. [Why that is exact, and
when it is refused](../logprob-in-place.md); [where results
differ](../logprob-in-place.md#where-results-are-not-upstreams).

`vocab_parallel_log_softmax`, which GKD calls, sums over ranks with a gradient, as 4.5.3 does, and computes the maximum
without one. Entropies and divergences are summed as before: everything after them is the same on all ranks, so each
rank needs only its own part of the gradient.

Without tensor parallelism, ms-swift's own functions run.""",
    changes_numbers="""\
Under tensor parallelism, the gradient of GRPO and GKD was wrong, by about half of its norm on two ranks, while losses
and log-probabilities were right: GKD since ms-swift 3.12.0, GRPO since 3.12.1 with entropies and since 4.0.3 always. An
affected run followed another direction with another norm. Treat its learning rate, clipping and KL coefficient as
untuned, and prefer to restart from the checkpoint before RL. Runs without tensor parallelism, DPO, KTO and SFT were
right.""",
    references=(
        "https://github.com/modelscope/ms-swift/issues/9778",
        "https://github.com/modelscope/ms-swift/pull/9947",
    ),
    variants=(
        Variant(
            Guard("ms-swift", "==3.12.0"),
            _log_softmax(_GKD),
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
    conditions=tuple(
        Condition(function, f"{__name__}:{has_a_gradient_of_parts.__name__}")
        for function in (
            *(f"{_MODULE}:{name}" for name in ("vocab_parallel_log_softmax", "compute_logps_and_entropy_from_logits")),
            _GKD,
        )
    ),
)
