"""Methods of TRL's trainers to 0.12 that transformers from 4.46 on calls with an additional argument: an advice."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_CLASSES = {"dpo": "DPOTrainer", "kto": "KTOTrainer", "orpo": "ORPOTrainer", "cpo": "CPOTrainer"}
_ITEMS = "num_items_in_batch"


def _methods(name: str) -> dict[str, str]:
    return {kind: f"trl.trainer.{kind}_trainer:{cls}.{name}" for kind, cls in _CLASSES.items()}


_LOSS, _LOG = _methods("compute_loss"), _methods("log")
_SAMPLES = (*_methods("get_batch_samples").values(), "trl.trainer.bco_trainer:BCOTrainer.get_batch_samples")


def _called_with_more(method: str, error: str, caller: str) -> tuple[Signature, ...]:
    """The error by its trainer: a trainer of a user's own with the same method is not TRL's."""
    return tuple(
        Signature("TypeError", f"{trainer}Trainer.{method}() {error}", (f"transformers.trainer:Trainer.{caller}",))
        for trainer in ("DPO", "KTO", "BCO", "ORPO", "CPO", "Reward")
    )


ADVICE = Advice(
    name="trl-trainer-overrides",
    summary="DPO, KTO, ORPO, CPO and others of TRL to 0.12 do not train with a later transformers",
    harm="crash",
    bug="DPO, KTO, ORPO, CPO and others of TRL to 0.12 do not train with a later transformers",
    when="trl before 0.12 with transformers 4.46 to 4.57, trl 0.12 with 4.47 to 4.57",
    symptom="""\
With TRL before 0.12 the first step of DPO, KTO, BCO, ORPO and CPO raises `AttributeError: 'generator' object has no
attribute 'generate'` or, from transformers 4.50 on, `TypeError: DPOTrainer.get_batch_samples() takes 3 positional
arguments but 4 were given`. Reward raises `TypeError: RewardTrainer.compute_loss() got an unexpected keyword argument
'num_items_in_batch'`. With TRL 0.12 the first log line raises `TypeError: DPOTrainer.log() takes 2 positional
arguments but 3 were given`, for KTO, BCO, ORPO and CPO too. Trainers of your own that override these methods in the
same way do the same.""",
    cause="""\
transformers 4.46.0 has a method `get_batch_samples`, which has another meaning in TRL, and passes the number of tokens
of the step to `compute_loss`; 4.47.0 passes the start time to `log`. These trainers override all three methods with
the old parameters. Accepting and ignoring the number would hide a loss that is normalized differently from what the
Trainer assumes.""",
    what_to_do="Pin `transformers<4.46` for trl before 0.12, `transformers<4.47` for 0.12, or use trl 0.13.0 or later.",
    signatures=(
        Signature("AttributeError", "'generator' object has no attribute 'generate'", _SAMPLES, specific=False),
        *_called_with_more(
            "get_batch_samples", "takes 3 positional arguments but 4 were given", "_inner_training_loop"
        ),
        *_called_with_more("compute_loss", f"got an unexpected keyword argument '{_ITEMS}'", "training_step"),
        *_called_with_more("log", "takes 2 positional arguments but 3 were given", "_maybe_log_save_evaluate"),
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
