"""Runs with a fault of a user's, whose step, rows, neighbors or checkpoint a rehearsal checks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers

from rlhf_patches.proving import states
from rlhf_patches.rehearsal.relation import Relation
from rlhf_patches.rehearsal.trainer import Ended, Rehearsal
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


class SavesHalf(transformers.Trainer):
    """Saves in bfloat16."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, {name: each.bfloat16() for name, each in self.model.state_dict().items()})


class SavesZeros(transformers.Trainer):
    """Saves a head of zeros."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        state_dict = self.model.state_dict()
        super()._save(output_dir, {**state_dict, "lm_head.weight": state_dict["lm_head.weight"] * 0})


def saving(does: Callable[[Any], Any], **settings: Any) -> Callable[[Use], None]:
    """A Llama of which something is not saved."""

    def build(use: Use) -> None:
        def changed(trainer: Any) -> None:
            does(trainer.model)
            use(trainer)

        runs.build("transformers/llama", changed, **settings)

    return build


def without_key(model: Any) -> None:
    model._keys_to_ignore_on_save = {"lm_head.weight"}


def with_head(model: Any) -> None:
    model.get_base_model().lm_head.weight.requires_grad_(True)


def of_the_hunt(name: str, **settings: Any) -> Callable[[Use], None]:
    return lambda use: runs.build(name, use, **settings)


def rehearsed(trainer: Any) -> list[Relation]:
    """With a checkpoint."""
    found: list[Relation] = []

    def end(relations: list[Relation]) -> None:
        found.extend(relations)
        raise Ended(0)

    with Rehearsal(trainer, end, saves=True).begun(), contextlib.suppress(Ended):
        trainer.train()
    assert not os.path.exists(os.path.join(trainer.args.output_dir, "checkpoint-1"))
    return found


SAVED: dict[str, Callable[[Use], None]] = {
    **{f"saves {name}": of_the_hunt(name) for name in (*RIGHT, "transformers/mixtral")},
    "saves LoRA": of_the_hunt("trl/sft", lora=True),
    "saves on ranks": of_the_hunt("trl/sft", ranks=2),
    "saves half": trained_by(SavesHalf),
    "saves zeros": trained_by(SavesZeros),
    "saves no key": saving(without_key),
    "saves no head": saving(with_head, lora=True),
    "saves nothing, skipped": with_scaler(3e38),
    "saves shards": of_the_hunt("transformers/llama", sharding="fsdp2", ranks=2),
}
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
    **SAVED,
    "scaled": with_scaler(256.0),
    "scaled, not fused": with_scaler(256.0, fused=False),
    "skipped": with_scaler(3e38),
    "infinite": with_scaler(256.0, does=infinite),
    "infinite, not fused": with_scaler(256.0, fused=False, does=infinite),
}


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="+", choices=[*CASES])
    parser.add_argument("--patches", choices=runs.PATCHES, default="off")
    options = parser.parse_args()
    os.chdir(options.out)
    rank = os.environ.get("RANK", "0")
    runs.of_this_process()
    found: dict[str, Any] = {}
    for case in options.cases:
        relations: list[Relation] = []
        use = rehearsed if case in SAVED else runs.rehearsed
        with runs.noted(options.patches) as acted:
            CASES[case](lambda trainer, into=relations, use=use: into.extend(use(trainer)))  # type: ignore[misc]
        found[case] = {"acted": acted, **{each.name: each.as_json() for each in relations}}
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
