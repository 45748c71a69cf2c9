"""verl's vectorized RLOO: train on a response that is alone in its group."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "verl.trainer.ppo.core_algos:compute_rloo_vectorized_outcome_advantage"

PATCH = Patch(
    name="verl-rloo-singletons",
    summary="the vectorized RLOO trains on the only response of a prompt, as the plain RLOO does",
    harm="wrong gradient",
    bug="the only response of a prompt has advantage 0, so the policy does not learn from it",
    when="adv_estimator=rloo_vectorized, and rollout.n=1 or filtered groups",
    excluded_by=(
        "algorithm.adv_estimator=gae|grpo|rloo|remax|opo|gpg|reinforce_plus_plus_baseline|reinforce_plus_plus",
    ),
    symptom="""\
`algorithm.adv_estimator=rloo_vectorized`, verl 0.6.0 to 0.9.1: with `rollout.n=1` all advantages and the policy's
gradient are 0, and the policy learns nothing. Where filtering has left one response of a prompt, the policy is not
trained on that response. There is no error. `rloo`, which is the same estimator according to verl's documentation,
trains on both.""",
    cause="""\
The average of the other responses' rewards does not exist for a single response. `rloo` then keeps the reward itself;
the vectorized estimator multiplies by `c > 1`, where `c` is the number of responses of the prompt, and so by 0.""",
    repair="""\
The advantage of a single response is its reward: REINFORCE without a baseline, to which RLOO's R(y_i) - 1/(k - 1) sum
over j != i of R(y_j) reduces for k = 1 (Ahmadian et al., 2024, arXiv 2402.14740). The advantages of all other responses
are bitwise identical.""",
    changes_numbers="""\
With verl 0.6.0 to 0.9.1, `rloo_vectorized` gave the advantage 0 to every response that was alone in its group. With the
patch the advantage of such a response is its reward, as with `rloo`. A run with `rollout.n=1` was not trained by its
rewards at all. A run that filters responses gets larger gradients, from its single responses, and can continue from
existing checkpoints.""",
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
                    target=_TARGET,
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
    obsolete_when="when verl's two RLOO estimators agree; in 0.9.1, the newest, they do not",
    conditions=(Condition(_TARGET, f"{__package__}._conditions:has_singletons"),),
)
