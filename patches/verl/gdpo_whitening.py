"""verl's GDPO: advantages are normalised over responses."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="verl-gdpo-whitening",
    summary="GDPO's advantages are normalised over the responses of a batch, whatever their lengths",
    harm="wrong gradient",
    bug="advantages are weighted by the lengths of the responses when they are normalised",
    when="adv_estimator=gdpo, and responses of different lengths",
    excluded_by=(
        "algorithm.adv_estimator=gae|grpo|rloo|remax|opo|gpg|reinforce_plus_plus_baseline|reinforce_plus_plus",
    ),
    symptom="""\
`algorithm.adv_estimator=gdpo`, verl 0.7.1 to 0.9.1, with responses of different lengths: the advantages of a batch do
not have mean 0 and variance 1 over responses. Where long responses are worse, their advantages are too close to 0 and
those of short ones too large, and the other way round. No error.""",
    cause="""\
GDPO's last step normalises the sum of the rewards' advantages, one number for each response, over the batch. verl does
it after that number was put on each token, over tokens: a response counts as often as it is long.""",
    repair="""\
Mean and variance are taken over responses, as the paper has it (Liu et al., 2026, arXiv 2601.05242, equation 6), with
the same 1e-8 below the root and the variance without bias, as verl has it over tokens. Responses without a token that
counts are left out.

The authors' own code normalises over tokens like verl's: who compares with their runs wants it off.""",
    contested="the authors' own code normalises over tokens as verl does, and pull request #6497 is open",
    changes_numbers="""\
with verl 0.7.1 to 0.9.1, GDPO's advantages were normalised with each response counted as often as it is long. With the
patch each counts once: advantages are shifted and scaled, the more, the more rewards and lengths go together; where all
are of one length, only by the difference between n and n - 1 responses. A run that was tuned with it can be trained on;
its learning rate and clipping were tuned for the other scale.""",
    references=(
        "https://github.com/verl-project/verl/pull/6497",
        "https://github.com/NVlabs/GDPO/issues/3",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.7.1,<=0.9.1"),
            (
                Rewrite(
                    target="verl.trainer.ppo.core_algos:compute_gdpo_outcome_advantage",
                    pattern="verl_F.masked_whiten(new_advantage, response_mask)",
                    replacement="$WHITENED(new_advantage, response_mask)",
                    inside="verl_F.masked_whiten(new_advantage, response_mask) * response_mask",
                    alongside=("new_advantage += weights[i] * normalized_score",),
                    uses={"WHITENED": f"{__package__}._whitening:whitened_over_responses"},
                ),
            ),
        ),
    ),
    obsolete_when="when verl normalises over responses; 0.9.1, the newest, does not",
)
