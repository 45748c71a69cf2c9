"""Older DPO with Liger's fused loss, which has no label smoothing: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, Condition, Guard, Shape, Variant

_TARGET = "trl.trainer.dpo_trainer:DPOTrainer.__init__"

ADVICE = Advice(
    name="trl-dpo-liger-label-smoothing",
    summary="DPO with Liger's loss ignores label_smoothing, in TRL before 0.29",
    harm="wrong gradient",
    bug="DPO with Liger's loss ignores label_smoothing, in TRL before 0.29",
    when="DPOTrainer with use_liger_loss (0.25.0 and later: use_liger_kernel) and label_smoothing above 0",
    excluded_by=("label_smoothing=0|0.0|absent", "trl=sft|grpo|kto|reward|rloo|gold"),
    symptom="""\
`DPOTrainer` with `use_liger_loss=True`, in 0.25.0 and later `use_liger_kernel=True`, `loss_type="sigmoid"` and
`label_smoothing` above 0: loss and gradient are those of `label_smoothing=0`. No error. Without Liger it is cDPO.""",
    cause="""\
The trainer does not pass the setting on, and Liger's `sigmoid` cannot use it: its losses before 0.8.1 accept no such
argument, and later ones, including 0.8.5, read it only for `robust` and `exo_pair`, with which the trainer does not
allow Liger.""",
    what_to_do="""\
With `label_smoothing`, set `use_liger_loss=False` (0.25.0 and later: `use_liger_kernel=False`). TRL 0.29.0 and later
have no smoothing for `sigmoid`, with Liger or without; in these releases `loss_type="robust"` has smoothing, with
Liger since 1.13.0 or by `trl-dpo-liger-settings`.""",
    references=(
        "https://github.com/huggingface/trl/pull/7062",
        "https://ericmitchell.ai/cdpo.pdf",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.19.0,<0.22.0"),
            (Shape(_TARGET, "LigerFusedLinearDPOLoss($$$GIVEN, average_log_prob=False)"),),
        ),
        Variant(
            Guard("trl", ">=0.22.0,<0.29.0"),
            (Shape(_TARGET, "LigerFusedLinearDPOLoss($$$GIVEN, loss_type=args.loss_type)"),),
        ),
    ),
    obsolete_when="when the oldest trl in use is 0.29.0",
    conditions=(Condition(_TARGET, "rlhf_patches.patches.trl._conditions:smooths_with_liger"),),
)
