"""ms-swift's GRPO with vLLM: signs that rollouts are not those of the policy that is trained."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "swift-watch-rollouts"
OTHER_POLICY = (
    "swift-async-rollout-lora",
    "swift-lora-counted-twice",
    "swift-rollout-update-failed",
    "swift-megatron-grpo-mask",
)
ONE_SEED = ("swift-rollout-worker-seed",)
_HERE = f"{__package__}._watched_rollouts"
_MEGATRON = Wrap(
    target="swift.megatron.trainers.base:BaseMegatronTrainer.on_log",
    implementation=f"{_HERE}:around_on_log",
    signature="(self, logs, prefix='')",
    signature_suffices="what is read is the metrics, where it has made numbers of them",
)


def _wraps(package: str, rows: str) -> tuple[Wrap, ...]:
    return (
        Wrap(
            target=f"{package}.grpo_trainer:GRPOTrainer.log",
            implementation=f"{_HERE}:around_log",
            signature="(self, logs, start_time=None)",
            signature_suffices="what is read is the metrics, where it has made numbers of them",
        ),
        Wrap(
            target=f"{package}.rollout_mixin:RolloutTrainerMixin._postprocess_rollout_outputs",
            implementation=f"{_HERE}:around_outputs",
            signature=f"(self, {rows}, outputs)",
            signature_suffices="what it is given is looked at only where it has lists of token ids",
        ),
    )


WATCH = Watch(
    name=NAME,
    summary="GRPO with vLLM is looked at for rollouts that do not come from the policy, and says so once",
    symptom="""\
One line of each figure, at level warning:

    swift-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
Log-probabilities that differ: vLLM samples with other weights than the trainer's (an update did not reach it, or it was
the base model without its adapter), or the two are not of the same tokens or temperature. Completions that are all
alike: engines share a seed.""",
    looks_at="""\
What the trainer logs anyway with `rollout_importance_sampling_mode` or `log_rollout_offpolicy_metrics`, which are off
unless asked for: `rollout_correction/kl`; since 4.0.0 with Megatron too. Its magnitude cannot be more than the mean
|trainer - engine|, in nats: it is the mean over the same tokens in which differences of either sign cancel, so what is
told is at least that much. Not `log_ppl_abs_diff`, in which each completion counts alike, so that a few tokens of short
ones decide it, nor `k3_kl` and `chi2_token`, which a few tokens can decide too. ms-swift compares log-probabilities of
the weights that the rollouts are of, in each mini-batch.

And, without Megatron, the lists of token ids and log-probabilities that vLLM returns for each batch of rollouts; not of
models that see images, whose prompts can differ in these alone.

Only in training, and where all of the vocabulary is sampled from: no top-p, top-k, min-p, penalty or
`structured_outputs_regex` (up to 4.0.2 ms-swift's own defaults are top-p 0.9 and top-k 50). Temperatures are those from
0.9, the default, to 1.1, since the log-probabilities of a server with vLLM before 0.10.2 are those at 1. Not with
`async_generate`, whose rollouts are older than the weights and differ rightly, nor with multi-turn rollouts, whose
tokens and log-probabilities are put together by a scheduler that can be the user's.""",
    limits="\n\n".join((figures.LOG_PROBABILITIES, figures.DROPOUT, figures.EQUAL)),
    points_to=(*OTHER_POLICY, *ONE_SEED),
    references=(
        "https://github.com/modelscope/ms-swift/issues/9855",
        "https://github.com/modelscope/ms-swift/blob/v4.6.0/swift/rlhf_trainers/grpo_trainer.py",
    ),
    variants=(
        Variant(
            Guard("ms-swift", ">=3.11.0,<4.0.0"), _wraps("swift.trainers.rlhf_trainer", "inputs"), independent=True
        ),
        Variant(
            Guard("ms-swift", ">=4.0.0,<4.4.0"),
            (*_wraps("swift.rlhf_trainers", "inputs"), _MEGATRON),
            independent=True,
        ),
        Variant(Guard("ms-swift", ">=4.4.0"), (*_wraps("swift.rlhf_trainers", "samples"), _MEGATRON), independent=True),
    ),
    obsolete_when="when ms-swift itself says that rollouts are not the policy's",
    affects_rollouts=True,
    observations=f"{_HERE}:observed",
)
