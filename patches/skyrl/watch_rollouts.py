"""SkyRL's trainer: signs that rollouts are not those of the policy that is trained."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "skyrl-watch-rollouts"

WATCH = Watch(
    name=NAME,
    summary="training is looked at for rollouts that do not come from the policy, and says so once",
    symptom="""\
One line, at level warning:

    skyrl-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
The engine samples with other weights than the trainer's, or for another row's prompt; or its log-probabilities are of
another temperature than the trainer divides by.""",
    looks_at="""\
`policy/rollout_train_logprobs_abs_diff_mean`, which `fwd_logprobs_values_reward` computes and logs where the generator
returns log-probabilities: once per batch of rollouts.

Not of a trainer with a training loop of its own, such as the fully asynchronous one, whose rollouts are older than the
weights; not with top-p, top-k, min-p or a repetition penalty, which the trainer's log-probabilities do not know of, nor
with `additional_kwargs`, by which structured outputs come; not where SkyRL skips the forward pass (0.4.0, a loss that
optimizes against the engine's).""",
    limits=figures.LOG_PROBABILITIES,
    points_to=("skyrl-rollout-temperature",),
    references=("https://github.com/NovaSky-AI/SkyRL/blob/main/skyrl/train/trainer.py",),
    variants=(
        Variant(
            Guard("skyrl", ">=0.1.0"),
            (
                Wrap(
                    target="skyrl.train.trainer:RayPPOTrainer.fwd_logprobs_values_reward",
                    implementation=f"{__package__}._watched_rollouts:around_forward",
                    signature="(self, training_input)",
                    signature_suffices="what is read is the trainer's metrics; where they are others nothing is said",
                ),
            ),
        ),
    ),
    obsolete_when="when SkyRL itself says that rollouts are not the policy's",
    affects_rollouts=True,
    observations=f"{__package__}._watched_rollouts:observed",
)
