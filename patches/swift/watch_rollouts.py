"""ms-swift's GRPO with vLLM: detects rollouts that do not come from the trained policy."""

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
    signature_suffices="it reads only metrics that are numbers",
)


def _wraps(package: str, rows: str) -> tuple[Wrap, ...]:
    return (
        Wrap(
            target=f"{package}.grpo_trainer:GRPOTrainer.log",
            implementation=f"{_HERE}:around_log",
            signature="(self, logs, start_time=None)",
            signature_suffices="it reads only metrics that are numbers",
        ),
        Wrap(
            target=f"{package}.rollout_mixin:RolloutTrainerMixin._postprocess_rollout_outputs",
            implementation=f"{_HERE}:around_outputs",
            signature=f"(self, {rows}, outputs)",
            signature_suffices="it reads the outputs only if they have lists of token ids",
        ),
    )


WATCH = Watch(
    name=NAME,
    summary="GRPO with vLLM is checked for rollouts that do not come from the policy; each finding is logged once",
    symptom="""\
One warning per figure:

    swift-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
Log-probabilities differ: vLLM samples with other weights than the trainer's (an update did not reach it, or it uses the
base model without its adapter), or the two use different tokens or temperatures. Completions are all alike: engines
share a seed.""",
    looks_at="""\
`rollout_correction/kl`, which the trainer logs with `rollout_importance_sampling_mode` or
`log_rollout_offpolicy_metrics`, both off by default; since 4.0.0 with Megatron too. Its magnitude is at most the mean
|trainer - engine|, in nats: it is the mean over the same tokens, in which differences of opposite sign cancel. The
actual difference is therefore at least the reported one. `log_ppl_abs_diff` is not used, because each completion has
the same weight in it, so a few tokens of short completions dominate it. `k3_kl` and `chi2_token` are not used, because
a few tokens can dominate them too. ms-swift compares log-probabilities under the weights that sampled the rollouts, in
each mini-batch.

Without Megatron, also the lists of token ids and log-probabilities that vLLM returns for each batch of rollouts; not
for models with images, whose prompts can differ in the images alone.

Only in training, and only if the whole vocabulary is sampled from: no top-p, top-k, min-p, penalty or
`structured_outputs_regex` (up to 4.0.2, ms-swift's own defaults are top-p 0.9 and top-k 50). The temperature must be
between 0.9, the default, and 1.1, because the log-probabilities of a server with vLLM before 0.10.2 are those at 1. Not
with `async_generate`, whose rollouts are legitimately from older weights, and not with multi-turn rollouts, whose
tokens and log-probabilities come from a scheduler that may be the user's.""",
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
    obsolete_when="when ms-swift itself reports rollouts that do not come from the policy",
    affects_rollouts=True,
    observations=f"{_HERE}:observed",
)
