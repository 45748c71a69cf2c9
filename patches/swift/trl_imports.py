"""Two advices for ms-swift with TRL before 0.17 and 0.22, which its requirement allows but which lack its imports."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_OLD, _NEW = "swift.trainers.rlhf_trainer.grpo_trainer:<module>", "swift.rlhf_trainers.grpo_trainer:<module>"
_GKD = "swift.rlhf_trainers.gkd_trainer:<module>"
_IMPORTED = "from trl.trainer.grpo_trainer import nanmax"
_GRPO_HAS_NONE = CoInstalled("trl", ">=0.14.0,<0.17.0")
_BOUND = "https://github.com/modelscope/ms-swift/blob/main/requirements/framework.txt"

ADVICE_GRPO = Advice(
    name="swift-grpo-trl-imports",
    summary="ms-swift's GRPO cannot be imported with TRL before 0.17, which its requirement allows",
    harm="crash",
    bug="ms-swift's GRPO cannot be imported with TRL before 0.17, which its requirement allows",
    when="GRPO of ms-swift 3.4.0 to 4.6.0 with trl before 0.17",
    symptom="""\
`swift rlhf --rlhf_type grpo` raises `ImportError: cannot import name 'nanmax' from 'trl.trainer.grpo_trainer'`, or
`'RepeatSampler'`, whichever the release imports first.""",
    cause="""\
ms-swift's GRPO imports names that `trl.trainer.grpo_trainer` has since 0.17.0. Its metadata require `trl>=0.15`, in
3.4 and 3.5 `trl>=0.13`.""",
    what_to_do="Use trl 0.17.0 or later, within the range that your ms-swift allows.",
    signatures=tuple(
        Signature("ImportError", f"cannot import name '{name}' from 'trl.trainer.grpo_trainer'", (_OLD, _NEW))
        for name in ("nanmax", "RepeatSampler", "nanmin")
    ),
    references=(_BOUND,),
    variants=(
        Variant(Guard("ms-swift", ">=3.4.0,<4", co_installed=_GRPO_HAS_NONE), (Shape(_OLD, _IMPORTED),)),
        Variant(Guard("ms-swift", ">=4.0.0,<=4.6.0", co_installed=_GRPO_HAS_NONE), (Shape(_NEW, _IMPORTED),)),
    ),
    obsolete_when="when the oldest TRL in use is 0.17.0",
)

ADVICE_GKD = Advice(
    name="swift-gkd-trl-imports",
    summary="ms-swift's GKD cannot be imported with TRL before 0.22, which its requirement allows",
    harm="crash",
    bug="ms-swift's GKD cannot be imported with TRL before 0.22, which its requirement allows",
    when="GKD of ms-swift 4.2.0 to 4.6.0 with trl before 0.22",
    symptom="""\
`swift rlhf --rlhf_type gkd` raises `ImportError: cannot import name 'RepeatSampler' from 'trl.trainer.utils'`.""",
    cause="""\
ms-swift's GKD imports a name that `trl.trainer.utils` has since 0.22.0. Its metadata require `trl>=0.15`.""",
    what_to_do="Use trl 0.22.0 or later.",
    signatures=(Signature("ImportError", "cannot import name 'RepeatSampler' from 'trl.trainer.utils'", (_GKD,)),),
    references=(_BOUND,),
    variants=(
        Variant(
            Guard("ms-swift", ">=4.2.0,<=4.6.0", co_installed=CoInstalled("trl", ">=0.13.0,<0.22.0")),
            (Shape(_GKD, "from trl.trainer.utils import RepeatSampler"),),
        ),
    ),
    obsolete_when="when the oldest TRL in use is 0.22.0",
)
