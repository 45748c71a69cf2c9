"""KTO with Liger's fused loss and PEFT: compared with the reference model, as without Liger."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_INIT = "trl.trainer.kto_trainer:KTOTrainer.__init__"


def ignores_the_reference(model: Any, ref_model: Any, args: Any, peft_config: Any) -> bool | None:
    """Whether Liger computes the loss and the reference is the PEFT model itself; None if the arguments do not say."""
    if args is None or ref_model is not None:
        return False
    liger = getattr(args, "use_liger_kernel", None)
    if not liger:
        return None if liger is None else False
    peft = getattr(sys.modules.get("peft"), "PeftModel", None)
    return peft_config is not None or (isinstance(peft, type) and isinstance(model, peft))


PATCH = Patch(
    name="trl-kto-liger-reference",
    summary="KTO with Liger's loss and PEFT uses the reference model",
    harm="wrong gradient",
    bug="the loss ignores the reference model, so the policy learns little, and drifts away from the reference",
    when="KTOTrainer with use_liger_kernel and a PEFT model",
    excluded_by=("use_liger_kernel=false|absent", "trl=sft|dpo|grpo|reward|rloo|gold"),
    symptom="""\
`KTOTrainer` with `use_liger_kernel=True` and a PEFT model: `rewards/chosen` and `rewards/rejected` are large and
negative from the first step, `kl` is right, the loss is near 0 or 1 for every example, and gradients are tiny. No
error. Without PEFT, or without Liger, nothing is wrong.""",
    cause="""\
The trainer creates the loss with `use_ref_model=(self.ref_model is not None)`. With PEFT there is no second model: the
reference is the same model with its adapter off. The trainer runs it for every batch, and the loss then ignores its
output.""",
    repair="""\
The patch creates the loss with `use_ref_model=True`, as in 1.13.0: with Liger, each batch has a reference, because
`__init__` rejects precomputed log-probabilities. With a reference model of its own nothing changes.""",
    changes_numbers="""\
Since TRL 1.8.0, KTO with Liger and PEFT trained without a reference. Gradients are larger with the patch, by the
saturation of a sigmoid: some thousand times for answers of some hundred tokens. Reset a learning rate that was raised
to compensate, and restart such a run.""",
    references=(
        "https://github.com/huggingface/trl/pull/7062",
        "https://github.com/huggingface/trl/pull/5876",
    ),
    variants=(
        Variant(
            Guard("trl", ">=1.8.0,<1.13.0"),
            (
                Rewrite(
                    target=_INIT,
                    pattern="LigerFusedLinearKTOLoss(beta=self.beta, use_ref_model=(self.ref_model is not None))",
                    replacement="LigerFusedLinearKTOLoss(beta=self.beta, use_ref_model=True)",
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.13.0",
    conditions=(Condition(_INIT, f"{__name__}:{ignores_the_reference.__name__}"),),
)
