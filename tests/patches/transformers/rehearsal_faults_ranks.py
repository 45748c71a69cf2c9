"""Runs with a fault of a user's, whose step, rows, neighbors or checkpoint a rehearsal checks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers

from rlhf_patches.proving import states
from rlhf_patches.rehearsal.relation import Relation
from tests.patches.transformers import rehearsal_ranks as runs

Use = Callable[[Any], None]
RIGHT = ("transformers/llama", "transformers/t5", "transformers/bert-classes", "trl/dpo", "trl/grpo")


class Before(transformers.TrainerCallback):
    """Does something to the model's gradients before the optimizer's step."""

    def __init__(self, does: Callable[[Any], Any]) -> None:
        self.does = does

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.does(model)


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def on_one_rank(model: Any) -> None:
    if os.environ.get("RANK") == "1":
        clip(model)


def without_head(model: Any) -> None:
    model.lm_head.weight.grad = None


def before(does: Callable[[Any], Any], most: float = 0.0, **settings: Any) -> Callable[[Use], None]:
    """A Llama whose gradients are changed before the step."""

    def build(use: Use) -> None:
        def called_back(trainer: Any) -> None:
            trainer.args.max_grad_norm = most
            trainer.add_callback(Before(does))
            use(trainer)

        runs.build("transformers/llama", called_back, **settings)

    return build


def infinite(model: Any) -> None:
    model.lm_head.weight.grad.fill_(float("inf"))


def with_scaler(scale: float, fused: bool = True, does: Callable[[Any], Any] = lambda _: None) -> Callable[[Use], None]:
    """Float16 with a gradient scaler, which accelerate leaves out on a CPU."""

    def build(use: Use) -> None:
        def scaled(trainer: Any) -> None:
            trainer.args.max_grad_norm = 0.1
            trainer.args.optim = "adamw_torch_fused" if fused else "adamw_torch"
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            trainer.accelerator.state._mixed_precision = "fp16"  # clipping asks for it
            trainer.accelerator.native_amp = True
            unscale = trainer.accelerator.unscale_gradients
            trainer.accelerator.unscale_gradients = lambda *given: (does(trainer.model), unscale(*given))
            use(trainer)
            assert not trainer.accelerator.scaler._per_optimizer_states

        runs.build("transformers/llama", scaled)

    return build


class FirstRow(transformers.Trainer):
    """Trains on one row of each micro-batch."""

    def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        return super().training_step(model, {name: each[:1] for name, each in inputs.items()}, *given, **named)


class OwnFirstRow(transformers.Trainer):
    """The same by a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        return model(**{name: each[:1] for name, each in inputs.items()}).loss / self.args.gradient_accumulation_steps


class OwnRows(transformers.Trainer):
    """All rows, by a loss of its own."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        return model(**inputs).loss / self.args.gradient_accumulation_steps


class Mixes(transformers.LlamaForCausalLM):
    """Adds the first row's mean to every row, as a batch norm would."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        named["inputs_embeds"] = self.model.embed_tokens(input_ids)
        named["inputs_embeds"] = named["inputs_embeds"] + named["inputs_embeds"][:1].mean(1, keepdim=True)
        return super().forward(labels=labels, **named)


Mixes.__module__ = transformers.LlamaForCausalLM.__module__  # as if it were a model of transformers


def trained_by(kind: type, model: type | None = None) -> Callable[[Use], None]:
    """A Llama in a user's trainer."""

    def build(use: Use) -> None:
        def own(trainer: Any) -> None:
            torch.manual_seed(1)
            made = (model or transformers.LlamaForCausalLM)(trainer.model.config)
            use(kind(made, trainer.args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator))

        runs.build("transformers/llama", own)

    return build


CASES: dict[str, Callable[[Use], None]] = {
    "clipped": before(lambda _: None, most=0.1),
    "clipped by hand": before(clip),
    "cleared": before(lambda model: model.zero_grad(), most=0.1),
    "head cleared": before(without_head),
    "first row": trained_by(FirstRow),
    "own first row": trained_by(OwnFirstRow),
    "own rows": trained_by(OwnRows),
    "mixes": trained_by(transformers.Trainer, Mixes),
    **{name: lambda use, name=name: runs.build(name, use, dropout=0.1) for name in RIGHT},  # type: ignore[misc]
    "gpt-oss": lambda use: runs.build("trl/sft-gpt_oss", use, padding_free=True),
    "on one rank": before(on_one_rank, ranks=2),
    "scaled": with_scaler(256.0),
    "scaled, not fused": with_scaler(256.0, fused=False),
    "skipped": with_scaler(3e38),
    "infinite": with_scaler(256.0, does=infinite),
    "infinite, not fused": with_scaler(256.0, fused=False, does=infinite),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+", choices=[*CASES])
    options = parser.parse_args()
    os.chdir(options.out)
    rank = os.environ.get("RANK", "0")
    runs.of_this_process()
    found: dict[str, Any] = {}
    for case in options.cases:
        relations: list[Relation] = []
        CASES[case](lambda trainer, into=relations: into.extend(runs.rehearsed(trainer)))  # type: ignore[misc]
        found[case] = {each.name: each.as_json() for each in relations}
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
