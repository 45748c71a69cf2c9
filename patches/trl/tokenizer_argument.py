"""TRL's trainers before 0.12 with transformers 5, whose Trainer accepts no `tokenizer`: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_CLASSES = {"sft": "SFTTrainer", "kto": "KTOTrainer", "orpo": "ORPOTrainer", "cpo": "CPOTrainer"}
_CLASSES |= {"reward": "RewardTrainer"}
_MADE = {kind: f"trl.trainer.{kind}_trainer:{cls}.__init__" for kind, cls in _CLASSES.items()}
_ALL = (*_MADE.values(), "trl.trainer.dpo_trainer:DPOTrainer.__init__")

ADVICE = Advice(
    name="trl-tokenizer-argument",
    summary="no trainer of TRL before 0.12 can be constructed with transformers 5",
    harm="crash",
    bug="no trainer of TRL before 0.12 can be constructed with transformers 5",
    when="trl before 0.12 with transformers from 5 on, which pip and uv choose for it",
    symptom="""\
`SFTTrainer(...)` raises `TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'`, within TRL,
whatever your script passes; so do Reward, KTO, ORPO and CPO. (If the last frame is your script's instead, the script
passes `tokenizer` itself to a newer TRL: call it `processing_class`.)""",
    cause="""\
These trainers pass their `tokenizer` to transformers' Trainer under that name. 4.46.0 renamed it to
`processing_class`, and 5.0.0 no longer accepts the old name.""",
    what_to_do="Pin `transformers<4.46` (`trl-trainer-overrides`), or use trl 0.13.0 or later.",
    signatures=(
        Signature(
            "TypeError", "Trainer.__init__() got an unexpected keyword argument 'tokenizer'", _ALL, specific=False
        ),
    ),
    references=("https://github.com/huggingface/trl/issues/6168",),
    variants=(
        Variant(
            Guard("trl", ">=0.8.2,<=0.11.4", co_installed=CoInstalled("transformers", ">=5.0.0rc0,<=5.24.0")),
            tuple(Shape(target, "super().__init__($$$A, tokenizer=tokenizer, $$$B)") for target in _MADE.values()),
        ),
    ),
    obsolete_when="when the oldest TRL in use is 0.12.0",
)
