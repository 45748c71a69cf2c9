"""verl's estimators with returns for each token: the reward of a trajectory that ends with a tool's answer counts."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_MODULE = "verl.trainer.ppo.core_algos"
_MOVED = f"{__package__}._rewards:on_tokens_that_count"


def _returns(function: str, name: str = "returns") -> Rewrite:
    """Of an estimator that sums the masked rewards from the end."""
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
_OTHERS = "grpo|grpo_vectorized|grpo_passk|gdpo|rloo|rloo_vectorized|opo|gpg"

PATCH = Patch(
    name="verl-reward-on-answer",
    summary="GAE, ReMax and the optimal token baseline see the reward of a trajectory that ends with a tool's answer",
    harm="wrong gradient",
    bug="a trajectory that ends with a tool's or a user's answer is trained without its reward",
    when="adv_estimator=gae, remax or *optimal_token_baseline, and trajectories that end with another's tokens",
    excluded_by=(f"algorithm.adv_estimator={_OTHERS}|reinforce_plus_plus|reinforce_plus_plus_baseline",),
    symptom="""\
PPO (`algorithm.adv_estimator=gae`, the default), ReMax (`remax`) or the optimal token baseline
(`optimal_token_baseline`, `tir_optimal_token_baseline`), and trajectories whose last token is a tool's or a user's:
an agent loop of your own that ends with an answer of its environment, or, with verl's own for tools in 0.6.0 to 0.7.1,
an interaction that says `should_terminate_sequence`. The reward is logged right. No error.

- GAE: advantages and the critic's returns of such a trajectory are those of a reward of 0.
- ReMax: its return is 0, and the baseline, which is the whole reward of another answer, is subtracted from it.
- The optimal token baseline: its return is 0, in its own advantages and in the baseline of its group.

Trajectories that end with the model's own tokens are right, unless the rollout correction rejects single tokens
(`rollout_rs=token_k1` and such): it takes them out of the mask before advantages are computed, and a rejected last
token takes the reward with it.""",
    cause="""\
verl puts the outcome's reward on the last token that is no padding, whoever wrote it, and these estimators multiply
rewards by `response_mask`, or skip tokens where it is 0, as tools' answers are. Its other estimators add up the rewards
of a whole trajectory, and have it.""",
    repair="""\
A reward on a token that does not count is added to the last token before it that does: in the decision process whose
actions are the model's tokens it is a part of the reward that followed that action, so nothing is discounted for it.
Then upstream's own lines run: GAE (Schulman et al., 2016, arXiv 1506.02438, equation 16) over the model's own tokens,
ReMax (Li et al., 2023, arXiv 2310.10505), and the optimal token baseline. Rewards that you put on answers between turns
count as well, and so do those of single tokens that were rejected. Where all rewards are on tokens that count, results
have the same bits.

Left alone: rewards before the first token that counts, which have no action that they could belong to, and responses
none of whose tokens counts; REINFORCE++ (`verl-reinforce-plus-plus-turns`), and estimators that add rewards up.""",
    changes_numbers="""\
with verl 0.5.0 to 0.9.1, GAE, ReMax and the optimal token baseline trained trajectories that end with a tool's or a
user's answer, or with a token that was rejected, as if their reward were 0. With the patch they have it, so advantages
change, by the whitening of GAE and the baseline of a group for other trajectories of the batch as well. A critic that
was trained with it expects too little of such trajectories, and learns the difference: the run can be trained on. Where
all rewards are on tokens that count nothing changes.""",
    references=(
        "https://github.com/verl-project/verl/pull/2337",
        "https://github.com/verl-project/verl/pull/6392",
        "https://github.com/verl-project/verl/issues/7278",
    ),
    variants=(
        Variant(Guard("verl", ">=0.5.0,<0.7.1"), (_GAE, _REMAX)),
        Variant(
            Guard("verl", ">=0.7.1,<=0.9.1"),
            (
                _GAE,
                _REMAX,
                _returns("compute_optimal_token_baseline_advantage"),
                _returns("compute_multi_turn_optimal_token_baseline_advantage", "token_returns"),
            ),
        ),
    ),
    obsolete_when=(
        "when verl puts the reward on a token that counts, or its estimators count those of others; 0.9.1 does not"
    ),
)
