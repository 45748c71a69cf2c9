"""The mean of the advantages that are normalised: over tokens of responses, as their variance is."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant


def _variant(versions: str, target: str, mask: str) -> Variant:
    return Variant(
        Guard("skyrl", versions),
        (
            Rewrite(
                target=target,
                pattern="advantages.mean()",
                replacement=f"masked_mean(advantages, {mask})",  # SkyRL's own, which both modules import
                alongside=(f"((advantages - mean).pow(2) * {mask}).sum()",),
            ),
        ),
    )


PATCH = Patch(
    name="skyrl-advantage-padding",
    summary="advantages are normalised by the mean over responses, without padding",
    harm="wrong gradient",
    bug="advantages are normalised with a mean that counts padding",
    when="trainer.algorithm.advantage_batch_normalize, and responses of different lengths",
    excluded_by=("trainer.algorithm.advantage_batch_normalize=false",),
    symptom="""\
With `trainer.algorithm.advantage_batch_normalize`, nothing fails. Normalised advantages have neither mean 0 nor
variance 1 over the tokens of responses, and change with the length to which the batch is padded: one long response
more, and all the others are trained on other advantages.""",
    cause="""\
The mean is taken over all positions of the batch, padding among them, and the variance around it over responses. With
GRPO, RLOO and REINFORCE++ padding counts as advantages of 0, so the mean is too small by the share of padding in the
batch, and the variance too large by the square of what is missing. With GAE padding holds what the recursion and the
critic left there.""",
    repair="""\
The mean is SkyRL's own `masked_mean` over `response_mask`, which the variance uses already: advantages are
A' = (A - mean(A)) / std(A) over all tokens of the batch's responses, as REINFORCE++ states it (Hu et al.,
[arXiv:2501.03262](https://arxiv.org/abs/2501.03262), global advantage normalisation), and go into the clipped objective
of PPO (Schulman et al., [arXiv:1707.06347](https://arxiv.org/abs/1707.06347), equation 7).""",
    changes_numbers="""\
All releases of SkyRL from 0.1.0 on subtract too small a mean with `advantage_batch_normalize=true`, by the share of
padding in the batch, so all tokens of a step were pushed up or down together by what was left, most where long
responses are better or worse than short ones. With the patch such a run sees other advantages from the next step on. A
checkpoint can be trained on; a learning rate or a clipping range that was chosen for it may want another look. Runs
without that setting, which is off by default, are as they were.""",
    references=("https://github.com/NovaSky-AI/SkyRL/issues/1305", "https://github.com/NovaSky-AI/SkyRL/pull/1782"),
    variants=(
        _variant(
            "==0.1.0", "skyrl.backends.skyrl_train.utils.ppo_utils:normalize_advantages_dict", mask="response_masks"
        ),
        _variant(">=0.2.0,<=0.4.0", "skyrl.train.trainer:RayPPOTrainer._normalize_advantages", mask="response_mask"),
    ),
    obsolete_when="when the oldest SkyRL in use takes a masked mean; 0.4.0, the newest, does not",
)
