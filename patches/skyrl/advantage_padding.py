"""Computes the mean of normalized advantages over response tokens, like their variance."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_DICT = "skyrl.backends.skyrl_train.utils.ppo_utils:normalize_advantages_dict"  # 0.1.0
_TRAINER = "skyrl.train.trainer:RayPPOTrainer._normalize_advantages"


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
    summary="advantages are normalized by their mean over response tokens, without padding",
    harm="wrong gradient",
    bug="advantages are normalized with a mean that includes padding",
    when="trainer.algorithm.advantage_batch_normalize, and responses of different lengths",
    excluded_by=("trainer.algorithm.advantage_batch_normalize=false",),
    symptom="""\
With `trainer.algorithm.advantage_batch_normalize` there is no error. Normalized advantages have neither mean 0 nor
variance 1 over response tokens, and depend on the length to which the batch is padded: one more long response changes
the advantages of all others.""",
    cause="""\
SkyRL computes the mean over all positions of the batch, including padding, and the variance around that mean over
responses. With GRPO, RLOO and REINFORCE++ padding counts as advantages of 0, so the mean is too small by the share of
padding in the batch, and the variance is too large by the square of the difference between the two means. With GAE,
padding holds values that remain from GAE's recursion and from the critic.""",
    repair="""\
The patch computes the mean with SkyRL's own `masked_mean` over `response_mask`, which the variance already uses.
Advantages become A' = (A - mean(A)) / std(A) over all tokens of the batch's responses, as in REINFORCE++ (Hu et al.,
[arXiv:2501.03262](https://arxiv.org/abs/2501.03262), global advantage normalization), and enter the clipped objective
of PPO (Schulman et al., [arXiv:1707.06347](https://arxiv.org/abs/1707.06347), equation 7).""",
    changes_numbers="""\
With `advantage_batch_normalize=true`, all releases of SkyRL from 0.1.0 on subtract a mean that is too small by the
share of padding in the batch. The difference pushed all tokens of a step up or down together, most where long responses
are better or worse than short ones. With the patch such a run gets different advantages from the next step on. Training
can continue from existing checkpoints; review a learning rate or a clipping range that was tuned without the patch.
Runs without that setting, which is off by default, are not affected.""",
    references=("https://github.com/NovaSky-AI/SkyRL/issues/1305", "https://github.com/NovaSky-AI/SkyRL/pull/1782"),
    variants=(
        _variant("==0.1.0", _DICT, mask="response_masks"),
        _variant(">=0.2.0,<=0.4.0", _TRAINER, mask="response_mask"),
    ),
    obsolete_when="when the oldest SkyRL in use computes a masked mean; 0.4.0, the newest, does not",
    conditions=(
        Condition(_DICT, f"{__package__}._conditions:mean_with_padding"),
        Condition(_TRAINER, f"{__package__}._conditions:normalized_mean_with_padding"),
    ),
)
