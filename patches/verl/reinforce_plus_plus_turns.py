"""verl's REINFORCE++: propagate the return to the turns before a tool's answer."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_TARGET = "verl.trainer.ppo.core_algos:compute_reinforce_plus_plus_outcome_advantage"

PATCH = Patch(
    name="verl-reinforce-plus-plus-turns",
    summary="REINFORCE++ credits the outcome's reward to every turn, not only to the last one",
    harm="wrong gradient",
    bug="all turns but the last are trained as if their return were 0",
    when="adv_estimator=reinforce_plus_plus, and several turns or tools",
    excluded_by=("algorithm.adv_estimator=gae|grpo|rloo|remax|opo|gpg|reinforce_plus_plus_baseline",),
    symptom="""\
The bug affects REINFORCE++ (`algorithm.adv_estimator=reinforce_plus_plus`) with tools or several turns. There is no
error; the logged rewards are right.

- verl 0.5.0 to 0.8.0: the tokens of all turns but the last are trained as if their return were 0, or the remainder
  after the KL penalty, so the model does not learn when or how to call a tool.
- verl 0.5.0 to 0.9.1: where the last token of a trajectory is a tool's or a user's, as with a custom agent loop that
  ends with an answer of its environment, all tokens of the trajectory are trained like that.

Trajectories of one turn without tools are right.""",
    cause="""\
Going backwards through the tokens, verl multiplies the running return by `response_mask`, which is meant for the
padding after the end. The mask is 0 on a tool's answer as well, so the return of later tokens is lost. Since 0.5.0 the
trainer keeps the rollout's mask, which excludes tools' answers. 0.4.0 and 0.4.1 have the same function, but their
trainer counts answers like the model's own tokens: in these releases the bug occurs with a custom trainer only.

0.9.0 carries the running return past such tokens, but without the reward on them. The outcome's reward is on the last
token that is not padding, whoever generated it.""",
    repair="""\
The running return passes tokens that do not count, without a discount, and includes the rewards on them. With rewards r
and a discount of gamma for each token of the model's own, the return at such a token t is the sum over all later r_s, t
included, of r_s times gamma to the number of the model's tokens from t up to s (Hu et al., 2025, arXiv 2501.03262;
there gamma is 1). Padding comes after all rewards and adds nothing.

The patch does not change the whitening, REINFORCE++ with a baseline, and all other estimators, which compute one number
per response. Reports cannot say whether a run met the bug: that depends on the values of masks and rewards.""",
    changes_numbers="""\
With verl 0.5.0 to 0.8.0, REINFORCE++ on trajectories with tools or several turns credited the outcome's reward to the
last turn only, and whitened over all turns; up to 0.9.1 it credited the reward to no turn where a trajectory ends with
another's token. With the patch every turn gets the reward, and advantages of the last turn change as well, since mean
and variance change. A run that was trained without the patch learned its last turns: training can continue from
existing checkpoints, but learning rate and KL coefficient were tuned for another signal. Trajectories of one turn are
not affected; with 0.9.0 and 0.9.1, neither are trajectories that end with the model's own tokens.""",
    references=("https://github.com/verl-project/verl/issues/7278", "https://github.com/verl-project/verl/pull/7300"),
    variants=(
        Variant(
            Guard("verl", ">=0.4.0,<0.9.0"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="token_level_rewards[:, t] + gamma * running_return",
                    # The sums keep the rewards' dtype: a product with a selected gamma would have the default dtype.
                    replacement=(
                        "torch.where(response_mask[:, t] > 0, token_level_rewards[:, t] + gamma * running_return, "
                        "token_level_rewards[:, t] + running_return)"
                    ),
                    inside="running_return = token_level_rewards[:, t] + gamma * running_return",
                    alongside=("returns[:, t] = running_return",),
                ),
                Rewrite(
                    target=_TARGET,
                    pattern="running_return * response_mask[:, t]",
                    replacement="running_return",
                    inside="running_return = running_return * response_mask[:, t]",
                ),
            ),
        ),
        Variant(
            Guard("verl", ">=0.9.0,<=0.9.1"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="running_return * (1 - response_mask[:, t])",
                    replacement="(token_level_rewards[:, t] + running_return) * (1 - response_mask[:, t])",
                    inside="new_running_return * response_mask[:, t] + running_return * (1 - response_mask[:, t])",
                    alongside=(
                        "new_running_return = token_level_rewards[:, t] + gamma * running_return",
                        "returns[:, t] = new_running_return * response_mask[:, t]",
                    ),
                ),
            ),
        ),
    ),
    obsolete_when="when verl's return includes rewards on tokens that do not count; 0.9.1, the newest, drops them",
)
