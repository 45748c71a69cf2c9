"""verl's GDPO: normalize advantages over responses."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_TARGET = "verl.trainer.ppo.core_algos:compute_gdpo_outcome_advantage"

PATCH = Patch(
    name="verl-gdpo-whitening",
    summary="GDPO's advantages are normalized over the responses of a batch, independent of their lengths",
    harm="wrong gradient",
    bug="the normalization of advantages weights responses by their lengths",
    when="adv_estimator=gdpo, and responses of different lengths",
    excluded_by=(
        "algorithm.adv_estimator=gae|grpo|rloo|remax|opo|gpg|reinforce_plus_plus_baseline|reinforce_plus_plus",
    ),
    symptom="""\
`algorithm.adv_estimator=gdpo`, verl 0.7.1 to 0.9.1, with responses of different lengths: the advantages of a batch do
not have mean 0 and variance 1 over responses. Where long responses are worse, their advantages are too close to 0 and
the advantages of short responses are too large, and vice versa. There is no error.""",
    cause="""\
GDPO's last step normalizes the sum of the rewards' advantages, one number per response, over the batch. verl first
copies this number to each token and then normalizes over tokens, so the weight of a response is its length.""",
    repair="""\
The patch computes mean and variance over responses, as in the paper (Liu et al., 2026, arXiv 2601.05242, equation 6),
with verl's own 1e-8 below the root and verl's own unbiased variance. Responses without a token that counts are left
out.

The authors' own code normalizes over tokens like verl's: disable the patch to compare with their runs.""",
    contested="the authors' own code normalizes over tokens as verl does, and pull request #6497 is open",
    changes_numbers="""\
With verl 0.7.1 to 0.9.1, the normalization of GDPO's advantages weighted each response by its length. With the patch
each response counts once: advantages are shifted and scaled, the more, the stronger rewards and lengths are correlated;
with equal lengths, they differ by the difference between n and n - 1 responses. Training can continue from existing
checkpoints; learning rate and clipping of such a run were tuned for the other scale.""",
    references=(
        "https://github.com/verl-project/verl/pull/6497",
        "https://github.com/NVlabs/GDPO/issues/3",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.7.1,<=0.9.1"),
            (
                Rewrite(
                    target=_TARGET,
                    pattern="verl_F.masked_whiten(new_advantage, response_mask)",
                    replacement="$WHITENED(new_advantage, response_mask)",
                    inside="verl_F.masked_whiten(new_advantage, response_mask) * response_mask",
                    alongside=("new_advantage += weights[i] * normalized_score",),
                    uses={"WHITENED": f"{__package__}._whitening:whitened_over_responses"},
                ),
            ),
        ),
    ),
    obsolete_when="when verl normalizes over responses; 0.9.1, the newest, does not",
    conditions=(Condition(_TARGET),),
)
