"""verl's PPO and GRPO: signs that rollouts are not those of the policy that is trained."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "verl-watch-rollouts"
OTHER_POLICY = ("verl-merged-lora", "verl-lora-buckets")
_OLD, _SYNC, _V1 = (
    f"verl.trainer.{name}.fit"
    for name in ("ppo.ray_trainer:RayPPOTrainer", "main_ppo_sync:PPOTrainer", "ppo.v1.trainer_base:PPOTrainer")
)
_HERE = f"{__package__}._watched_rollouts"


def _fit(target: str, signature: str = "(self)") -> Wrap:
    return Wrap(
        target=target,
        implementation=f"{_HERE}:around_fit",
        signature=signature,
        signature_suffices="it only says which trainer is running",
    )


_LOG = Wrap(
    target="verl.utils.tracking:Tracking.log",
    implementation=f"{_HERE}:around_log",
    signature="(self, data, step, backend=None)",
    signature_suffices="what is read is its arguments; where they are others nothing is said",
)

WATCH = Watch(
    name=NAME,
    summary="PPO and GRPO are looked at for rollouts that do not come from the policy, which is said once",
    symptom="""\
One line at level warning:

    verl-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
The engine samples with other weights than the trainer's: an update did not reach it, or a part of it did, or it was the
base model without its adapter.""",
    looks_at="""\
What the trainer logs for each step anyway, where `rollout.calculate_log_probs` is on (the default since 0.9.1):
`training/rollout_probs_diff_mean`, the mean |p - q| of the sampled tokens' probabilities, and, where
`algorithm.rollout_correction` is not null, the magnitude of `rollout_corr/kl`. Neither can be more than the mean
|log p - log q| over the same tokens: no probability is above 1, where the logarithm's slope is 1; and differences of
either sign cancel in a mean. The larger one is taken, so what is told is at least that much, and may be much more where
probabilities are small. Not `rollout_corr/log_ppl_abs_diff`: each sequence counts alike there, so with short ones it
can be ten times the mean over tokens.

Only of the synchronous trainers (`main_ppo`, `main_ppo_sync`, and `trainer_mode=sync`), whose rollouts are of the
weights that the log-probabilities are computed with; with temperature 1 and without top-p and top-k, since an engine's
log-probabilities may be those before these; and not with rollouts of another run (`skip`) or a sampler of one's own.

Completions are not looked at: the trainer has no lists of their tokens.""",
    limits=figures.LOG_PROBABILITIES,
    points_to=OTHER_POLICY,
    references=(
        "https://github.com/verl-project/verl/issues/6782",
        "https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/debug/metrics.py",
    ),
    variants=(
        Variant(Guard("verl", ">=0.6.0,<0.8.0"), (_fit(_OLD), _LOG), independent=True),
        Variant(Guard("verl", ">=0.8.0,<0.9.0"), (_fit(_OLD), _fit(_SYNC), _LOG), independent=True),
        Variant(
            Guard("verl", ">=0.9.0"), (_fit(_OLD), _fit(_V1, "(self, agent_loop_manager)"), _LOG), independent=True
        ),
    ),
    obsolete_when="when verl itself says that rollouts are not the policy's",
    affects_rollouts=True,
    observations=f"{_HERE}:observed",
)
