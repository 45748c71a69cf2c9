"""KTO with Liger's fused loss and PEFT: held against the reference model, as without Liger."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="trl-kto-liger-reference",
    summary="KTO with Liger's loss and PEFT is held against the reference model",
    harm="wrong gradient",
    bug="the reference model does not count, so that hardly anything is learned, and what is pulls away from it",
    when="KTOTrainer with use_liger_kernel and a PEFT model",
    excluded_by=("use_liger_kernel=false|absent",),
    symptom="""\
`KTOTrainer` with `use_liger_kernel=True` and a PEFT model: `rewards/chosen` and `rewards/rejected` are large and
negative from the first step, `kl` is right, the loss is near 0 or 1 for every example, and gradients are tiny. No
error. Without PEFT, or without Liger, nothing is wrong.""",
    cause="""\
The loss is made with `use_ref_model=(self.ref_model is not None)`. With PEFT there is no second model: the reference
is the same one with its adapter off, which is run for every batch, and what it says is then left out of the loss.""",
    repair="""\
The loss is made with `use_ref_model=True`, as in 1.13.0: each batch has a reference in all configurations, and those
that have none with Liger (precomputed ones) are refused by `__init__`. With a reference model of its own nothing
changes.""",
    changes_numbers="""\
Since TRL 1.8.0, KTO with Liger and PEFT trained against no reference at all. Gradients are larger with the patch, by
the saturation of a sigmoid: some thousand times for answers of some hundred tokens. A learning rate that was raised to
make up for it should be put back, and such a run begun again.""",
    references=(
        "https://github.com/huggingface/trl/pull/7062",
        "https://github.com/huggingface/trl/pull/5876",
    ),
    variants=(
        Variant(
            Guard("trl", ">=1.8.0,<1.13.0"),
            (
                Rewrite(
                    target="trl.trainer.kto_trainer:KTOTrainer.__init__",
                    pattern="LigerFusedLinearKTOLoss(beta=self.beta, use_ref_model=(self.ref_model is not None))",
                    replacement="LigerFusedLinearKTOLoss(beta=self.beta, use_ref_model=True)",
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.13.0",
)
