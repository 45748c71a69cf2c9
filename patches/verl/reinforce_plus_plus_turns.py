"""verl's REINFORCE++: the return reaches the turns before a tool's answer."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_TARGET = "verl.trainer.ppo.core_algos:compute_reinforce_plus_plus_outcome_advantage"

PATCH = Patch(
    name="verl-reinforce-plus-plus-turns",
    summary="REINFORCE++ gives the outcome's reward to every turn, not to the last one alone",
    harm="wrong gradient",
    bug="all turns but the last are trained as if their return were 0",
    when="adv_estimator=reinforce_plus_plus, and several turns or tools",
    excluded_by=("algorithm.adv_estimator=gae|grpo|rloo|remax|opo|gpg|reinforce_plus_plus_baseline",),
    symptom="""\
REINFORCE++ (`algorithm.adv_estimator=reinforce_plus_plus`) with tools or several turns. No error; rewards are logged
right.

- verl 0.5.0 to 0.8.0: the tokens of all turns but the last are trained as if their return were 0, or what the KL
  penalty leaves of it, so the model does not learn when to call a tool, or how.
- verl 0.5.0 to 0.9.1: where the last token of a trajectory is a tool's or a user's, as with an agent loop of your own
  that ends with an answer of its environment, all its tokens are trained like that.

One turn without tools is right.""",
    cause="""\
Going backwards through the tokens, the running return is multiplied by `response_mask`, which is meant for the padding
after the end. The mask is 0 on a tool's answer as well, and what comes after that is forgotten. Since 0.5.0 the
trainer keeps the mask of the rollout, which leaves tools' answers out. 0.4.0 and 0.4.1 have the same function, but
their trainer counts answers like the model's own tokens: there only a trainer of your own meets it.

0.9.0 carries the running return past such tokens, without the reward that one of them has. The outcome's reward is on
the last token that is no padding, whoever wrote it.""",
    repair="""\
The running return passes tokens that do not count, without a discount, and takes up the rewards that are put on them.
With rewards r and a discount of gamma for each token of the model's own, the return at such a token t is the sum over
all later r_s, t included, of r_s times gamma to the number of the model's tokens from t up to s (Hu et al., 2025, arXiv
2501.03262; there gamma is 1). Padding is after all rewards and adds nothing. Whitening is as it was.

Left alone: REINFORCE++ with a baseline and all other estimators, which give a response one number.""",
    changes_numbers="""\
with verl 0.5.0 to 0.8.0, REINFORCE++ on trajectories with tools or several turns gave the outcome's reward to the last
turn only, and whitened over all; up to 0.9.1 it gave it to none where a trajectory ends with another's token. With the
patch every turn has it, and advantages of the last turn change as well, since mean and variance do. A run that was
trained with it learned its last turns: it can be trained on, and its learning rate and KL coefficient were tuned for
another signal. Trajectories of one turn are as before; with 0.9.0 and 0.9.1 so are all that end with the model's own
tokens.""",
    references=("https://github.com/verl-project/verl/issues/7278", "https://github.com/verl-project/verl/pull/7300"),
    variants=(
        Variant(
            Guard("verl", ">=0.4.0,<0.9.0"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="token_level_rewards[:, t] + gamma * running_return",
                    # Sums of the rewards' dtype: a product with a selected gamma would have the default one.
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
    obsolete_when="when verl's return counts rewards of tokens that do not count; 0.9.1, the newest, drops them",
)
