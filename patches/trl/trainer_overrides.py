"""Methods of TRL's trainers to 0.12 that transformers from 4.46 on calls with an argument more: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_CLASSES = {"dpo": "DPOTrainer", "kto": "KTOTrainer", "orpo": "ORPOTrainer", "cpo": "CPOTrainer"}
_ITEMS = "num_items_in_batch"


def _methods(name: str) -> dict[str, str]:
    return {kind: f"trl.trainer.{kind}_trainer:{cls}.{name}" for kind, cls in _CLASSES.items()}


_LOSS, _LOG = _methods("compute_loss"), _methods("log")
_SAMPLES = (*_methods("get_batch_samples").values(), "trl.trainer.bco_trainer:BCOTrainer.get_batch_samples")

ADVICE = Advice(
    name="trl-trainer-overrides",
    summary="DPO, KTO, ORPO, CPO and others of TRL to 0.12 do not train beside a later transformers",
    harm="crash",
    bug="DPO, KTO, ORPO, CPO and others of TRL to 0.12 do not train beside a later transformers",
    when="trl before 0.12 beside transformers 4.46 to 4.57, trl 0.12 beside 4.47 to 4.57",
    symptom="""\
Of TRL before 0.12 the first step ends, for DPO, KTO, BCO, ORPO and CPO in `AttributeError: 'generator' object has no
attribute 'generate'` or, from transformers 4.50 on, in `TypeError: DPOTrainer.get_batch_samples() takes 3 positional
arguments but 4 were given`, and for Reward in `TypeError: RewardTrainer.compute_loss() got an unexpected keyword
argument 'num_items_in_batch'`. Of TRL 0.12 the first line of the log ends in `TypeError: DPOTrainer.log() takes 2
positional arguments but 3 were given`; so do KTO, BCO, ORPO and CPO. Trainers of your own that override these methods
so do the same.""",
    cause="""\
transformers 4.46.0 has a method `get_batch_samples`, which means something else to TRL, and gives `compute_loss` the
number of tokens of the step; 4.47.0 gives `log` the time of its start. These override all three as they were. To
swallow the number would hide a loss that is normalised otherwise than the Trainer believes.""",
    what_to_do="Pin `transformers<4.46` for trl before 0.12, `transformers<4.47` for 0.12, or use trl 0.13.0 or later.",
    signatures=(
        Signature("AttributeError", "'generator' object has no attribute 'generate'", _SAMPLES, specific=False),
        Signature(
            "TypeError",
            "Trainer.get_batch_samples() takes 3 positional arguments but 4 were given",
            ("transformers.trainer:Trainer._inner_training_loop",),
        ),
        Signature(
            "TypeError",
            f"compute_loss() got an unexpected keyword argument '{_ITEMS}'",
            ("transformers.trainer:Trainer.training_step",),
        ),
        Signature(
            "TypeError",
            "Trainer.log() takes 2 positional arguments but 3 were given",
            ("transformers.trainer:Trainer._maybe_log_save_evaluate",),
        ),
    ),
    references=(
        "https://github.com/huggingface/trl/issues/2445",
        "https://github.com/huggingface/transformers/issues/36331",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.8.2,<=0.11.4", co_installed=CoInstalled("transformers", ">=4.46.0,<5.0.0rc0")),
            tuple(Shape(target, "self.get_batch_loss_metrics($$$)", unless=(_ITEMS,)) for target in _LOSS.values()),
        ),
        Variant(
            Guard("trl", ">=0.12.0,<=0.12.2", co_installed=CoInstalled("transformers", ">=4.47.0,<5.0.0rc0")),
            (
                *(
                    Shape(_LOG[kind], "return super().log(logs)", unless=("start_time",))
                    for kind in ("dpo", "orpo", "cpo")
                ),
                *(Shape(target, _ITEMS) for target in _LOSS.values()),
            ),
        ),
    ),
    obsolete_when="when the oldest TRL in use is 0.13.0",
)
