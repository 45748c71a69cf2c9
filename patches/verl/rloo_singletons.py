"""verl's vectorised RLOO: a response that is alone in its group is trained on."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="verl-rloo-singletons",
    summary="the vectorised RLOO trains on a response without others of its prompt, as the plain one does",
    harm="wrong gradient",
    bug="a response without others of its prompt has advantage 0, and nothing is learnt from it",
    when="adv_estimator=rloo_vectorized, and rollout.n=1 or filtered groups",
    excluded_by=(
        "algorithm.adv_estimator=gae|grpo|rloo|remax|opo|gpg|reinforce_plus_plus_baseline|reinforce_plus_plus",
    ),
    symptom="""\
`algorithm.adv_estimator=rloo_vectorized`, verl 0.6.0 to 0.9.1: with `rollout.n=1` all advantages are 0, the policy's
gradient as well, and nothing is learned; where filtering has left one response of a prompt, that one is not trained on.
No error. `rloo`, which the documentation has as the same estimator, trains on both.""",
    cause="""\
The average of the others' rewards does not exist where there are none. `rloo` then keeps the reward itself; the
vectorised estimator multiplies by `c > 1`, the number of responses of the prompt, and so by 0.""",
    repair="""\
A response without others keeps its reward as its advantage: REINFORCE without a baseline, which is what is left of
RLOO's R(y_i) - 1/(k - 1) sum over j != i of R(y_j) for k = 1 (Ahmadian et al., 2024, arXiv 2402.14740). All others are
as they were, bit for bit.""",
    changes_numbers="""\
with verl 0.6.0 to 0.9.1, `rloo_vectorized` gave the advantage 0 to every response that was alone in its group. With the
patch these have their reward, as with `rloo`. A run with `rollout.n=1` was not trained by its rewards at all; one that
filters responses gets larger gradients, by the responses that were left alone, and can be trained on.""",
    references=(
        "https://github.com/verl-project/verl/issues/7793",
        "https://github.com/verl-project/verl/pull/7581",
        "https://github.com/verl-project/verl/pull/7794",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.6.0,<=0.9.1"),
            (
                Rewrite(
                    target="verl.trainer.ppo.core_algos:compute_rloo_vectorized_outcome_advantage",
                    pattern="$ADVANTAGE * (c > 1)",
                    replacement="torch.where(c > 1, $ADVANTAGE, scores)",
                    inside="adv = $ADVANTAGE * (c > 1)",
                    alongside=(
                        "c = torch.bincount(inv)[inv].to(scores.dtype)",
                        "scores = token_level_rewards.sum(dim=-1)",
                    ),
                ),
            ),
        ),
    ),
    obsolete_when="when verl's two RLOO agree; 0.9.1, the newest, does not have it",
)
