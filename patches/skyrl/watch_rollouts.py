"""SkyRL's trainer: detect rollouts that do not come from the policy that is trained."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "skyrl-watch-rollouts"

WATCH = Watch(
    name=NAME,
    summary="logs once if the rollouts of a training run do not come from the policy",
    symptom="""\
One line, at level warning:

    skyrl-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
The engine samples with weights other than the trainer's, or for another row's prompt; or its log-probabilities are at
another temperature than the trainer's.""",
    looks_at="""\
`policy/rollout_train_logprobs_abs_diff_mean`, which `fwd_logprobs_values_reward` computes and logs where the generator
returns log-probabilities: once per batch of rollouts.

The watch does not cover trainers with their own training loop, such as the fully asynchronous one, whose rollouts are
older than the weights; runs with top-p, top-k, min-p or a repetition penalty, which the trainer's log-probabilities
ignore; runs with `additional_kwargs`, which request structured outputs; and runs where SkyRL skips the forward pass
(0.4.0, a loss that optimizes against the engine's log-probabilities).""",
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
                    signature_suffices="the wrapper reads the trainer's metrics; where they differ, it logs nothing",
                ),
            ),
        ),
    ),
    obsolete_when="when SkyRL itself reports rollouts that are not the policy's",
    affects_rollouts=True,
    observations=f"{__package__}._watched_rollouts:observed",
)
