"""verl's REINFORCE++: the return reaches the turns before a tool's answer."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_TARGET = "verl.trainer.ppo.core_algos:compute_reinforce_plus_plus_outcome_advantage"

PATCH = Patch(
    name="verl-reinforce-plus-plus-turns",
    summary="REINFORCE++ gives the outcome's reward to every turn, not to the last one alone",
    symptom="""\
REINFORCE++ (`algorithm.adv_estimator=reinforce_plus_plus`) with tools or several turns, verl 0.5.0 to 0.8.0: the tokens
of all turns but the last are trained as if their return were 0, or what the KL penalty leaves of it, so the model does
not learn when to call a tool, or how. No error; rewards are logged right. One turn without tools is right.""",
    cause="""\
Going backwards through the tokens, the running return is multiplied by `response_mask`, which is meant for the padding
after the end. The mask is 0 on a tool's answer as well, and what comes after that is forgotten. Since 0.5.0 the
trainer keeps the mask of the rollout, which leaves tools' answers out. 0.4.0 and 0.4.1 have the same function, but
their trainer counts answers like the model's own tokens: there only a trainer of your own meets it.""",
    repair="""\
The running return passes tokens that do not count as it is, without a discount, as in 0.9.0. With rewards r and a
discount of gamma for each token of the model's own, the return at such a token t is the sum over all later r_s, t
included, of r_s times gamma to the number of the model's tokens from t up to s (Hu et al., 2025, arXiv 2501.03262;
there gamma is 1). A reward that is put on a token that does not count reaches the turns before it, too; 0.9.0 drops it.
Padding is after all rewards and adds nothing. Whitening is as it was.

Left alone: REINFORCE++ with a baseline and all other estimators, which give a response one number.""",
    changes_numbers="""\
with verl 0.5.0 to 0.8.0, REINFORCE++ on trajectories with tools or several turns gave the outcome's reward to the last
turn only, and whitened over all. With the patch every turn has it, and advantages of the last turn change as well,
since mean and variance do. A run that was trained with it learned its last turns: it can be trained on, and its
learning rate and KL coefficient were tuned for another signal. Trajectories of one turn are as before.""",
    references=("https://github.com/verl-project/verl/issues/7278", "https://github.com/verl-project/verl/pull/7300"),
    variants=(
        Variant(
            Guard("verl", ">=0.4.0,<0.9.0"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="gamma * running_return",
                    replacement="torch.where(response_mask[:, t] > 0, gamma, 1.0) * running_return",
                    inside="token_level_rewards[:, t] + gamma * running_return",
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
    ),
    retire="when the oldest verl in use is 0.9.0",
)
