"""NeMo-RL's GRPO: detect rollouts that do not come from the policy that is trained."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "nemo-rl-watch-rollouts"

WATCH = Watch(
    name=NAME,
    summary="logs once if GRPO's rollouts do not come from the policy",
    symptom="""\
One line, at level warning:

    nemo-rl-watch-rollouts: trainer and engine differ by 0.21 nats per sampled token at step 3 (limit 0.1). ...""",
    cause="""\
The engine samples with weights other than the trainer's, from another distribution (temperature, a part of the
vocabulary), or for another row's prompt; or the trainer trains tokens that nobody sampled, such as an answer in the
prompt, whose log-probability is 0.""",
    looks_at="""\
`generation_logprobs` and `prev_logprobs`, the arguments of `compute_and_apply_seq_logprob_error_masking` in the process
that drives the run, once per step, before the function masks anything; only if they are in the host's memory.

The watch does not read `token_mult_prob_error`, the mean of exp|difference|: one token of 100,000 that is off by 15
nats makes this metric 34, and where a step has several batches of `train_global_batch_size`, the logged value is their
sum.

The watch does not cover steps whose metrics have `avg_trajectory_age`: asynchronous rollouts are older than the
weights, and differ by design. It does not cover runs where `force_on_policy_ratio` skips `prev_logprobs`.""",
    limits=figures.LOG_PROBABILITIES,
    points_to=(),
    references=(
        "https://github.com/NVIDIA-NeMo/RL/blob/v0.7.0/docs/guides/grpo.md",
        "https://github.com/NVIDIA-NeMo/RL/blob/v0.7.0/nemo_rl/algorithms/grpo.py",
    ),
    # 0.5.0 has no function that receives both. main had version 0.6.0 on 2026-08-22, after v0.7.0.
    variants=(
        Variant(
            Guard("nemo-rl", ">=0.6.0"),
            (
                Wrap(
                    target="nemo_rl.algorithms.grpo:compute_and_apply_seq_logprob_error_masking",
                    implementation=f"{__package__}._watched_rollouts:around_masking",
                    signature="(train_data, rewards, seq_logprob_error_threshold)",
                    signature_suffices="the wrapper reads the arguments only where they have the tensors, on the CPU",
                ),
                Wrap(
                    target="nemo_rl.utils.logger:Logger.log_metrics",
                    implementation=f"{__package__}._watched_rollouts:around_log_metrics",
                    signature="(self, metrics, step, prefix='', step_metric=None, step_finished=False)",
                    signature_suffices="the wrapper reads the names of the metrics and the step",
                ),
            ),
        ),
    ),
    obsolete_when="when NeMo-RL itself reports rollouts that are not the policy's",
    affects_rollouts=True,
    observations=f"{__package__}._watched_rollouts:observed",
)
