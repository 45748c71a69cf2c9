"""TRL's trainers with transformers 5.1 and later, whose models no longer have a dictionary of warnings."""

from __future__ import annotations

from rlhf_patches import CoInstalled, Guard, Patch, Rewrite, Signature, Variant

_WITHOUT = CoInstalled("transformers", ">=5.1.0,<=5.24.0")
_CLASSES = {
    "bco": "BCOTrainer",
    "cpo": "CPOTrainer",
    "dpo": "DPOTrainer",
    "grpo": "GRPOTrainer",
    "kto": "KTOTrainer",
    "online_dpo": "OnlineDPOTrainer",
    "orpo": "ORPOTrainer",
    "reward": "RewardTrainer",
    "rloo": "RLOOTrainer",
}


def _written(versions: str, trainers: str, experimental: str = "") -> Variant:
    modules = {kind: f"trl.trainer.{kind}_trainer" for kind in trainers.split()}
    modules |= {kind: f"trl.experimental.{kind}.{kind}_trainer" for kind in experimental.split()}
    changes = tuple(
        Rewrite(
            target=f"{module}:{_CLASSES[kind]}.__init__",
            pattern='model.warnings_issued["estimate_tokens"] = True',
            replacement='getattr(model, "warnings_issued", {})["estimate_tokens"] = True',
        )
        for kind, module in modules.items()
    )
    return Variant(Guard("trl", versions, co_installed=_WITHOUT), changes, independent=True)


PATCH = Patch(
    name="trl-warnings-issued",
    summary="with transformers 5.1 and later, TRL's trainers work without a model's dictionary of warnings",
    harm="crash",
    bug="trainers cannot be constructed: they write to a dictionary that models no longer have",
    when="GRPO, RLOO, DPO, KTO, Reward and others of trl before 0.27.2 with transformers from 5.1 on",
    symptom="""\
With transformers 5.1 or later `GRPOTrainer(...)` raises `AttributeError: 'Qwen2ForCausalLM' object has no attribute
'warnings_issued'`; so do RLOO, DPO, KTO, BCO, CPO, ORPO, OnlineDPO and, until TRL 0.23, Reward. SFT does not.""",
    cause="""\
Their `__init__` sets `model.warnings_issued["estimate_tokens"]`, so that transformers' `estimate_tokens` does not warn
about inputs that it cannot count. transformers 5.1.0 removed the dictionary and the warning.""",
    repair="""\
The patch sets the entry if the model has the dictionary, and skips it otherwise: there is no warning to prevent. The
patch adds nothing to the model. TRL 0.27.2 does not set the entry. To import these trainers with transformers 5.3 and
later, `trl-optional-packages` is needed too.""",
    signatures=(Signature("AttributeError", "object has no attribute 'warnings_issued'", specific=False),),
    references=(
        "https://github.com/huggingface/trl/issues/3257",
        "https://github.com/unslothai/unsloth/pull/7854",
    ),
    variants=(
        _written(">=0.14.0,<0.22.0", "bco cpo dpo grpo kto online_dpo orpo reward"),
        _written(">=0.22.0,<0.24.0", "bco cpo dpo grpo kto online_dpo orpo reward rloo"),
        _written(">=0.24.0,<0.25.0", "bco cpo dpo grpo kto online_dpo orpo rloo"),
        _written(">=0.25.0,<0.26.0", "cpo dpo grpo kto online_dpo orpo rloo", "bco"),
        _written(">=0.26.0,<0.27.2", "dpo grpo rloo", "bco cpo kto online_dpo orpo"),
    ),
    obsolete_when="when the oldest trl in use is 0.27.2",
)
