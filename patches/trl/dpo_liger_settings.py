"""DPO with Liger's fused loss: the user's `label_smoothing` and `discopop_tau` take effect."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlhf_patches import CoInstalled, Condition, Guard, Patch, Rewrite, Signature, Variant


def settings(loss: Any, args: Any) -> dict[str, float]:
    """The extra arguments of Liger's own class that are not bound yet; another class gets what TRL passes.

    Liger rejects robust with a smoothing of half or more, about which TRL only warns: training then goes without it.
    """
    found = {"label_smoothing": args.label_smoothing, "discopop_tau": args.discopop_tau}
    if "robust" in args.loss_type and not 0 <= args.label_smoothing < 0.5:
        del found["label_smoothing"]
    while isinstance(loss, partial):
        found = {name: value for name, value in found.items() if name not in loss.keywords}
        loss = loss.func
    # known: Liger's own class with its own __init__, whose releases the guard names
    made = getattr(vars(loss).get("__init__"), "__globals__", {}) if isinstance(loss, type) else {}
    return found if made and _is_of_liger(loss.__module__) and _is_of_liger(made.get("__name__")) else {}


def _is_of_liger(module: object) -> bool:
    return str(module).partition(".")[0] == "liger_kernel"


PATCH = Patch(
    name="trl-dpo-liger-settings",
    summary="DPO with Liger's loss uses the user's label_smoothing and discopop_tau",
    harm="wrong gradient",
    bug="loss_type robust ignores label_smoothing, and discopop ignores discopop_tau",
    when="DPOTrainer with use_liger_kernel and loss_type robust, discopop or exo_pair",
    excluded_by=("use_liger_kernel=false|absent", "trl=sft|grpo|kto|reward|rloo|gold"),
    symptom="""\
`DPOTrainer` with `use_liger_kernel=True` and `loss_type="robust"`: loss and gradient are those of `"sigmoid"`,
whatever `label_smoothing` is. With `"discopop"` they are those of `discopop_tau=0.05`. No error. `"exo_pair"` raises
`ValueError: label_smoothing must be > 0 for loss_type='exo_pair'`, whatever `label_smoothing` is. Without Liger the
bug does not occur.""",
    cause="""\
Since 0.8.1 Liger's loss has these types, and accepts both settings. The trainer passes only `beta` and `loss_type`, so
`label_smoothing` is 0 and `discopop_tau` 0.05.""",
    repair="""\
The patch passes `label_smoothing` and `discopop_tau` to the loss too, as in 1.13.0. Types that read neither setting
stay bit for bit identical; Liger's `"sigmoid"` reads none, nor does TRL's without Liger since 0.29.0. A class that
replaces Liger's, or one whose `__init__` is replaced, gets what TRL gives it. A `label_smoothing` that Liger rejects
for `"robust"`, half or more, is left out as before; TRL warns about it, and 1.13.0 raises.""",
    changes_numbers="""\
Since TRL 0.29.0 with Liger 0.8.1 and later, DPO with Liger trained `robust` as if no preference were flipped, which is
`sigmoid`, and `discopop` with its default temperature. With the patch the configured loss is used, and hardly anything
of such a run carries over: with `robust` gradients are larger, the more pairs disagree with their labels.""",
    signatures=(
        Signature(
            "ValueError",
            "label_smoothing must be > 0 for loss_type='exo_pair'",
            frames=("trl.trainer.dpo_trainer:DPOTrainer.__init__",),
            raised_below=True,  # by Liger
        ),
    ),
    references=(
        "https://github.com/huggingface/trl/pull/7062",
        "https://github.com/huggingface/trl/pull/7059",
        "https://arxiv.org/abs/2403.00409",
    ),
    variants=(
        Variant(
            Guard(
                "trl",
                ">=0.29.0,<1.13.0",
                co_installed=CoInstalled("liger-kernel", ">=0.8.1,<=0.8.5", package="liger_kernel"),
            ),
            (
                Rewrite(
                    target="trl.trainer.dpo_trainer:DPOTrainer.__init__",
                    pattern="LigerFusedLinearDPOLoss(beta=args.beta, loss_type=self.loss_types[0])",
                    replacement=(
                        "LigerFusedLinearDPOLoss(beta=args.beta, loss_type=self.loss_types[0],"
                        " **$SETTINGS(LigerFusedLinearDPOLoss, args))"
                    ),
                    uses={"SETTINGS": f"{__name__}:{settings.__name__}"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use is 1.13.0",
    conditions=(
        Condition("trl.trainer.dpo_trainer:DPOTrainer.__init__", f"{__package__}._conditions:settings_of_liger"),
    ),
)
