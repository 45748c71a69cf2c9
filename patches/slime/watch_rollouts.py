"""slime: signs that rollouts are not those of the policy that is trained, and responses beyond their limit."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "slime-watch-rollouts"
TOO_LONG = ("slime-partial-rollout-budget",)
_HERE = f"{__package__}._watched_rollouts"

WATCH = Watch(
    name=NAME,
    summary="training with SGLang is looked at for rollouts that do not come from the policy, which is said once",
    symptom="""\
One line of each figure, at level warning:

    slime-watch-rollouts: a completion is 12 tokens beyond the limit at rollout 3 (limit 0). ...""",
    cause="""\
Log-probabilities that differ: SGLang samples with other weights than the trainer's. Responses that are too long: what a
sample had when it was aborted was not taken off when it was resumed.""",
    looks_at="""\
`train/train_rollout_logprob_abs_diff`, which slime logs for each step where the engine's log-probabilities are there,
as it does in every run: the mean over samples of the mean |trainer - engine| of their tokens, in nats. Only with
`--colocate`, where rollouts are of the weights that the log-probabilities are computed with, and rollouts that slime
samples (`sglang_rollout`, `fully_async_rollout`), not those of `sft_rollout`, or of a file by `forge_load`; not with
`--partial-rollout`, `--keep-old-actor`, `--use-rollout-logprobs`, rollouts loaded from a file, a temperature other than
1, top-p or top-k.

`response_length` of the samples of each rollout, which is a number, against `--rollout-max-response-len`, where slime's
own `generate` makes them.""",
    limits=f"""\
{figures.LOG_PROBABILITIES}

`long-completions`: the tokens of the longest response beyond the limit: above 0.""",
    points_to=TOO_LONG,
    references=(
        "https://github.com/THUDM/slime/pull/2261",
        "https://github.com/THUDM/slime/blob/v0.3.1/slime/backends/megatron_utils/loss.py",
    ),
    variants=(
        Variant(
            Guard("slime", ">=0.2.2", may_be_missing="main, which still calls itself 0.3.1, logs elsewhere"),
            (
                Wrap(
                    target="slime.utils.logging_utils:log",
                    implementation=f"{_HERE}:around_log",
                    signature="(args, metrics, step_key)",
                    signature_suffices="what is read is its arguments; where they are others nothing is said",
                ),
                Wrap(
                    target="slime.ray.rollout:_log_rollout_data",
                    implementation=f"{_HERE}:around_rollout",
                    signature="(rollout_id, args, samples, rollout_extra_metrics, rollout_time)",
                    signature_suffices="what is read is the length of its samples; where there is none nothing is said",
                ),
            ),
            independent=True,
        ),
    ),
    obsolete_when="when slime itself says that rollouts are not the policy's",
    affects_rollouts=True,
    observations=f"{_HERE}:observed",
)
