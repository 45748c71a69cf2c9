"""verl's PPO and GRPO: detect rollouts that do not come from the policy that is trained."""

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
        signature_suffices="the wrapper only records which trainer is running",
    )


_LOG = Wrap(
    target="verl.utils.tracking:Tracking.log",
    implementation=f"{_HERE}:around_log",
    signature="(self, data, step, backend=None)",
    signature_suffices="the wrapper reads the function's arguments; where they differ, it logs nothing",
)

WATCH = Watch(
    name=NAME,
    summary="logs once if the rollouts of PPO or GRPO do not come from the policy",
    symptom="""\
One line at level warning:

    verl-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
The engine samples with weights other than the trainer's: an update did not reach the engine, or reached it in part, or
sent the base model without its adapter.""",
    looks_at="""\
The metrics that the trainer logs for each step, where `rollout.calculate_log_probs` is on (the default since 0.9.1):
`training/rollout_probs_diff_mean`, the mean |p - q| of the sampled tokens' probabilities, and, where
`algorithm.rollout_correction` is not null, the magnitude of `rollout_corr/kl`. Neither can exceed the mean
|log p - log q| over the same tokens: no probability is above 1, where the logarithm's slope is 1; and differences of
opposite sign cancel in a mean. The watch takes the larger metric, so the reported value is a lower bound, and the
difference may be much larger where probabilities are small. The watch does not read `rollout_corr/log_ppl_abs_diff`:
this metric weights each sequence equally, so with short sequences it can be ten times the mean over tokens.

The watch covers the synchronous trainers only (`main_ppo`, `main_ppo_sync`, and `trainer_mode=sync`), whose rollouts
come from the weights that compute the log-probabilities; only with temperature 1 and without top-p and top-k, since an
engine may return log-probabilities from before these settings; and not with rollouts of another run (`skip`) or a
custom sampler.

The watch does not read completions: the trainer has no lists of their tokens.""",
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
    obsolete_when="when verl itself reports rollouts that are not the policy's",
    affects_rollouts=True,
    observations=f"{_HERE}:observed",
)
