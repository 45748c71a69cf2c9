"""Online DPO's logged KL divergence and entropy: sums over completions, without padding."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OURS = f"{__package__}._completion_metrics"
_MASK = "padding_mask = ~completion_mask.bool()"
_FILLED = "logprobs.masked_fill(padding_mask, 1.0)"  # 0.10.1
_TARGETS = tuple(
    f"trl.{where}online_dpo_trainer:OnlineDPOTrainer.training_step"
    for where in ("trainer.", "experimental.online_dpo.")
)


def _masked(target: str) -> tuple[Rewrite, Rewrite]:
    return (
        Rewrite(
            target,
            "kl = logprobs - ref_logprobs",
            "kl = $DIFFERENCE(logprobs - ref_logprobs, padding_mask)",
            alongside=(_MASK, "mean_kl = kl.sum(1).mean()"),
            unless=(_FILLED,),
            uses={"DIFFERENCE": f"{_OURS}:difference"},
        ),
        Rewrite(
            target,
            "-logprobs.sum(1).mean()",
            "-$WITHOUT(logprobs, padding_mask).sum(1).mean()",
            alongside=(_MASK,),
            unless=(_FILLED,),
            uses={"WITHOUT": f"{_OURS}:without"},
        ),
    )


PATCH = Patch(
    name="trl-online-dpo-metrics",
    summary="Online DPO's logged KL divergence, entropy and rewards leave padding out",
    harm="wrong metric",
    bug="objective/kl, objective/entropy, objective/non_score_reward and objective/rlhf_reward count padding",
    when="OnlineDPOTrainer, and completions of one batch that differ in length",
    excluded_by=("trl=sft|dpo|grpo|kto|reward|rloo",),
    symptom="""\
`OnlineDPOTrainer` logs a wrong `objective/kl`, and an `objective/entropy` that is too large. The more the completions
of a batch differ in length, the larger is the error: with three to five tokens 0.25 for 0.31 nats, and 22.9 for 19.3.
`objective/non_score_reward` is `-beta` times that, and `objective/rlhf_reward` has it as a summand. The loss,
`rewards/*` and `logps/*` are right. No error.""",
    cause="""\
Completions are padded to one length. The trainer masks padding in the sums that its loss and `rewards/*` use. It adds
up the log-probabilities of all positions, padding included, for these four metrics.""",
    repair="""\
For these metrics the patch sets log-probabilities, and their differences from the reference's, to 0 where there is
padding. Loss, gradient, weights and all other metrics stay bit for bit identical. Batches without padding log the same
numbers as before, bit for bit. Nash-MD and XPO mask padding themselves. TRL 0.10.1, which has another error in its
entropy, stays as released.""",
    references=("https://github.com/huggingface/trl/issues/6861",),
    variants=(
        Variant(Guard("trl", ">=0.11.0,<0.26.0"), _masked(_TARGETS[0])),
        Variant(Guard("trl", ">=0.26.0,<=1.16.0"), _masked(_TARGETS[1])),
    ),
    obsolete_when="when the oldest trl in use masks padding in these metrics; no release so far does",
    conditions=tuple(map(Condition, _TARGETS)),
)
