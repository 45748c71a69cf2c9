"""verl's estimators with per-token returns: count the reward of a trajectory that ends with a tool's answer."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_MODULE = "verl.trainer.ppo.core_algos"
_MOVED = f"{__package__}._rewards:on_tokens_that_count"


def _returns(function: str, name: str = "returns") -> Rewrite:
    """The change of an estimator that sums the masked rewards from the end."""
    return Rewrite(
        target=f"{_MODULE}:{function}",
        pattern="token_level_rewards * response_mask",
        replacement="$MOVED(token_level_rewards, response_mask) * response_mask",
        alongside=(f"{name} = (token_level_rewards * response_mask).flip(dims=[-1]).cumsum(dim=-1).flip(dims=[-1])",),
        uses={"MOVED": _MOVED},
    )


_GAE = Rewrite(
    target=f"{_MODULE}:compute_gae_advantage_return",
    pattern="token_level_rewards.shape[-1]",
    replacement="(token_level_rewards := $MOVED(token_level_rewards, response_mask)).shape[-1]",
    inside="gen_len = token_level_rewards.shape[-1]",
    alongside=(
        "delta = token_level_rewards[:, t] + gamma * nextvalues - values[:, t]",
        "lastgaelam = lastgaelam_ * response_mask[:, t] + (1 - response_mask[:, t]) * lastgaelam",
    ),
    uses={"MOVED": _MOVED},
)
_REMAX = _returns("compute_remax_outcome_advantage")
_OF_TOKENS = (
    _returns("compute_optimal_token_baseline_advantage"),
    _returns("compute_multi_turn_optimal_token_baseline_advantage", "token_returns"),
)
_OTHERS = "grpo|grpo_vectorized|grpo_passk|gdpo|rloo|rloo_vectorized|opo|gpg"

PATCH = Patch(
    name="verl-reward-on-answer",
    summary="GAE, ReMax and the optimal token baseline count the reward of a trajectory that ends with a tool's answer",
    harm="wrong gradient",
    bug="a trajectory that ends with a tool's or a user's answer is trained without its reward",
    when="adv_estimator=gae, remax or *optimal_token_baseline, and trajectories whose last token is not the policy's",
    excluded_by=(f"algorithm.adv_estimator={_OTHERS}|reinforce_plus_plus|reinforce_plus_plus_baseline",),
    symptom="""\
PPO (`algorithm.adv_estimator=gae`, the default), ReMax (`remax`) or the optimal token baseline
(`optimal_token_baseline`, `tir_optimal_token_baseline`), with trajectories whose last token is a tool's or a user's:
from a custom agent loop that ends with an answer of its environment, or, with verl's own tool loop in 0.6.0 to 0.7.1,
from an interaction that returns `should_terminate_sequence`. The logged reward is right. There is no error.

- GAE: advantages and the critic's returns of such a trajectory are those of a reward of 0.
- ReMax: its return is 0, and the baseline, the whole reward of another answer, is subtracted from it.
- The optimal token baseline: its return is 0, in its own advantages and in the baseline of its group.

Trajectories that end with the model's own tokens are right, unless the rollout correction rejects single tokens
(`rollout_rs=token_k1` and similar): the correction removes them from the mask before advantages are computed, and a
rejected last token loses its reward.""",
    cause="""\
verl puts the outcome's reward on the last token that is not padding, whoever generated it. These estimators multiply
rewards by `response_mask`, or skip tokens where the mask is 0, which includes tools' answers. verl's other estimators
add up the rewards of a whole trajectory, and are not affected.""",
    repair="""\
The patch adds a reward on a token that does not count to the last token before it that counts: in the decision process
whose actions are the model's tokens, the reward follows that action, so it is not discounted. Then upstream's own lines
run: GAE (Schulman et al., 2016, arXiv 1506.02438, equation 16) over the model's own tokens, ReMax (Li et al., 2023,
arXiv 2310.10505), and the optimal token baseline. Rewards that you put on answers between turns count as well, and so
do rewards of single rejected tokens. Where all rewards are on tokens that count, results are bitwise identical.

The patch does not change rewards before the first token that counts, which follow no action, and responses without a
token that counts; REINFORCE++ (`verl-reinforce-plus-plus-turns`); and estimators that add rewards up.""",
    changes_numbers="""\
With verl 0.5.0 to 0.9.1, GAE, ReMax and the optimal token baseline trained trajectories that end with a tool's or a
user's answer, or with a rejected token, as if their reward were 0. With the patch they get the reward, so advantages
change, through the whitening of GAE and the baseline of a group also for other trajectories of the batch. A critic that
was trained without the patch expects too little of such trajectories, and learns the difference: training can continue
from existing checkpoints. Where all rewards are on tokens that count, nothing changes.""",
    references=(
        "https://github.com/verl-project/verl/pull/2337",
        "https://github.com/verl-project/verl/pull/6392",
        "https://github.com/verl-project/verl/issues/7278",
    ),
    variants=(
        Variant(Guard("verl", ">=0.5.0,<0.7.1"), (_GAE, _REMAX)),
        Variant(
            Guard("verl", ">=0.7.1,<=0.9.1"),
            (_GAE, _REMAX, *_OF_TOKENS),
        ),
    ),
    obsolete_when=(
        "when verl puts the reward on a token that counts, or its estimators count the others' too; 0.9.1 does not"
    ),
    conditions=tuple(Condition(each.target) for each in (_GAE, _REMAX, *_OF_TOKENS)),
)
