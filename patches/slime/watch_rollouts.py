"""slime: detects rollouts that do not come from the trained policy, and responses over their limit."""

from __future__ import annotations

from rlhf_patches import Guard, Variant, Watch, Wrap

from .._rollouts import figures

NAME = "slime-watch-rollouts"
TOO_LONG = ("slime-partial-rollout-budget",)
_HERE = f"{__package__}._watched_rollouts"

WATCH = Watch(
    name=NAME,
    summary=(
        "training with SGLang is checked for rollouts that do not come from the policy; each finding is logged once"
    ),
    symptom="""\
One warning per figure:

    slime-watch-rollouts: a completion is 12 tokens beyond the limit at rollout 3 (limit 0). ...""",
    cause="""\
Log-probabilities differ: SGLang samples with other weights than the trainer's. Responses are too long: a resumed sample
got its full length again, without subtracting the tokens that it had when it was aborted.""",
    looks_at="""\
`train/train_rollout_logprob_abs_diff`: the mean over samples of the mean |trainer - engine| of their tokens, in nats.
slime logs it for each step that has the engine's log-probabilities, which is the case in every run. The value is read
only with `--colocate`, where rollouts come from the weights that the log-probabilities are computed with, and only for
rollouts that slime samples (`sglang_rollout`, `fully_async_rollout`), not those of `sft_rollout`, or of a file by
`forge_load`. It is not read with `--partial-rollout`, `--keep-old-actor`, `--use-rollout-logprobs`, rollouts loaded
from a file, a temperature other than 1, top-p or top-k.

`response_length` of the samples of each rollout, which is a number, against `--rollout-max-response-len`, if slime's
own `generate` makes them.""",
    limits=f"""\
{figures.LOG_PROBABILITIES}

`long-completions`: the number of tokens of the longest response over the limit; warns above 0.""",
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
                    signature_suffices="it reads only the arguments; if they differ, it logs nothing",
                ),
                Wrap(
                    target="slime.ray.rollout:_log_rollout_data",
                    implementation=f"{_HERE}:around_rollout",
                    signature="(rollout_id, args, samples, rollout_extra_metrics, rollout_time)",
                    signature_suffices="it reads only the length of the samples; without one, it logs nothing",
                ),
            ),
            independent=True,
        ),
    ),
    obsolete_when="when slime itself reports rollouts that do not come from the policy",
    affects_rollouts=True,
    observations=f"{_HERE}:observed",
)
