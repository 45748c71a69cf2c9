"""TRL's own samplers with transformers from 4.52 on, which passes the data set to them: two advices."""

from __future__ import annotations

from rlhf_patches import Advice, CoInstalled, Guard, Shape, Signature, Variant

_GIVES = CoInstalled("transformers", ">=4.52.0,<=5.24.0")
_CAUSE = """\
Since 4.52.0 transformers' Trainer calls `_get_train_sampler(dataset)`, and these trainers override the method without
the parameter. A patch keeps a function's parameters, so no patch repairs this."""
_REFERENCES = (
    "https://github.com/gensyn-ai/rl-swarm/issues/304",
    "https://github.com/shangshang-wang/Tina/issues/4",
)


def _target(trainer: str) -> str:
    return f"trl.trainer.{trainer}_trainer:{trainer.upper()}Trainer._get_train_sampler"


def _signature(trainer: str) -> Signature:
    return Signature(
        "TypeError",
        f"{trainer}Trainer._get_train_sampler() takes 1 positional argument but 2 were given",
        ("transformers.trainer:Trainer.get_train_dataloader", "transformers.trainer:Trainer._get_dataloader"),
    )


_KTO, _BCO = (Shape(_target(kind), "return SequentialSampler(self.train_dataset)") for kind in ("kto", "bco"))

ADVICE_GRPO = Advice(
    name="trl-grpo-train-sampler",
    summary="GRPO of TRL before 0.17 does not train with transformers from 4.52 on",
    harm="crash",
    bug="GRPO of TRL before 0.17 does not train with transformers from 4.52 on",
    when="GRPO of trl 0.15 and 0.16 with transformers from 4.52 on, which pip and uv choose for it",
    symptom="""\
`trainer.train()` raises at once `TypeError: GRPOTrainer._get_train_sampler() takes 1 positional argument but 2 were
given`; so do trainers that were copied from it.""",
    cause=_CAUSE,
    what_to_do="""\
Pin `transformers<4.52`, or use trl 0.17.0 or later. In a trainer of your own: `def _get_train_sampler(self,
dataset=None)`.""",
    signatures=(_signature("GRPO"),),
    references=_REFERENCES,
    variants=(
        Variant(
            Guard("trl", ">=0.15.0,<=0.16.1", co_installed=_GIVES), (Shape(_target("grpo"), "RepeatRandomSampler"),)
        ),
    ),
    obsolete_when="when the oldest TRL in use is 0.17.0",
)

ADVICE_KTO = Advice(
    name="trl-kto-train-sampler",
    summary="KTO and BCO of TRL before 0.18 do not train with transformers from 4.52 on",
    harm="crash",
    bug="KTO and BCO of TRL before 0.18 do not train with transformers from 4.52 on",
    when="KTO of trl 0.8 to 0.17, BCO of 0.10 to 0.17, with transformers from 4.52 on, which pip chooses for it",
    symptom="""\
`trainer.train()` raises at once `TypeError: KTOTrainer._get_train_sampler() takes 1 positional argument but 2 were
given`; BCOTrainer does the same.""",
    cause=_CAUSE,
    what_to_do="Pin `transformers<4.52`, or use trl 0.18.0 or later.",
    signatures=(_signature("KTO"), _signature("BCO")),
    references=_REFERENCES,
    variants=(
        Variant(Guard("trl", ">=0.8.0,<=0.9.6", co_installed=_GIVES), (_KTO,)),
        Variant(Guard("trl", ">=0.10.1,<=0.17.0", co_installed=_GIVES), (_KTO, _BCO)),
    ),
    obsolete_when="when the oldest TRL in use is 0.18.0",
)
