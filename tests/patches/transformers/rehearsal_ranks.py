"""Trainers of the hunt, and ones with faults of a user's, whose first window is held against itself."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import numpy
import torch
import transformers

import rlhf_patches
from hunt import hf_trainer, sharded, trainers
from hunt.rehearse import relations as rehearsed
from rlhf_patches.patches.deepspeed.proofs import on_cpu
from rlhf_patches.proving import states
from rlhf_patches.rehearsal import start
from rlhf_patches.rehearsal.relation import Relation
from rlhf_patches.rehearsal.trainer import Rehearsal

SETTINGS: dict[str, Any] = {"micro_batch": 2, "accumulation": 4}
PATCHES = ("off", "on")
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "dropout": {"dropout": 0.1},
    "LoRA": {"lora": True},
    "checkpointing": {"checkpointing": True},
    "reentrant": {"checkpointing": "reentrant"},
    "bfloat16": {"dtype": "bfloat16"},
    "sdpa": {"attention": "sdpa"},
    "rows by themselves": {"micro_batch": 1, "accumulation": 8},
    **{kind: {"sharding": kind} for kind in ("zero1", *sharded.KINDS)},
    "float32 sums": {"deepspeed": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "packing": {"packing": True},
    "padding-free": {"padding_free": True},
    "evaluated": {"evaluated": 4},
    "little memory": {"little": True},
    "two of three": {"micro_batch": 3, "accumulation": 2, "rows": 12},
}
"""Of the trainers' settings; a trainer that does not take one of them is not run."""


def takes(name: str) -> set[str]:
    """The settings of a trainer of the hunt, and those of SFT's that the hunt does not vary for each model."""
    return {*trainers.every()[name].takes, *(("packing", "padding_free") if name.startswith("trl/sft") else ())}


def build(name: str, use: Callable[[Any], None], **settings: Any) -> None:
    """Have a trainer of the hunt built, and use it; ``deepspeed`` are more settings of its configuration."""
    more = settings.pop("deepspeed", {})
    chosen = trainers.every()[name]
    taken = takes(name)
    given = {key: value for key, value in (SETTINGS | settings).items() if key in taken}

    def once(trainer: Any) -> Any:
        use(trainer)
        return {}

    if "sharding" in given:  # another trainer in this process may have set up accelerate otherwise
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with hf_trainer.handed_to(once), configured(more):
        chosen.run(**chosen.fixed, **given)


@contextlib.contextmanager
def configured(more: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Meanwhile the hunt's trainers have more in their DeepSpeed configuration."""
    before = on_cpu.of_trainer

    def of_trainer(*given: Any) -> dict[str, Any]:
        made = before(*given)
        return made | {name: {**made.get(name, {}), **each} for name, each in more.items()}

    on_cpu.of_trainer = of_trainer
    try:
        yield
    finally:
        on_cpu.of_trainer = before


def table(name: str, patches: str, ranks: int, **settings: Any) -> dict[str, Any]:
    """What is said of each relation."""
    if not {*settings} <= {*takes(name), *SETTINGS, "deepspeed", "little"}:
        return {"cannot": "it does not take these settings"}
    found: list[Relation] = []
    little = settings.pop("little", False)
    try:
        with noted(patches) as acted:
            build(name, lambda trainer: found.extend(rehearsed(trainer, little)), ranks=ranks, **settings)
    except trainers.CannotRun as error:
        return {"cannot": str(error)}
    return {"acted": acted, **{each.name: each.as_json() for each in found}}


@contextlib.contextmanager
def noted(patches: str) -> Iterator[dict[str, list[str]]]:
    """Meanwhile the patches are on or off; which of them have met their bug by the end, and which only ran."""
    if patches == "on":
        rlhf_patches.apply()
    before, acted = asked(), dict[str, list[str]]()
    try:
        yield acted
        after = {name: (numbers, before.get(name, (0, 0))) for name, numbers in asked().items()}
        acted["repaired"] = [name for name, ((_, now), (_, earlier)) in after.items() if now > earlier]
        ran = [name for name, ((now, _), (earlier, _)) in after.items() if now > earlier]
        acted["ran"] = [name for name in ran if name not in acted["repaired"]]
    finally:
        rlhf_patches.revert()


def asked() -> dict[str, tuple[int, int]]:
    """How often each repair ran in this process, and how often it met its bug."""
    met, ran = start.acted()
    rows = [row for row in rlhf_patches.report() if row.name in (*met, *ran) and row.reached is not None]
    return {row.name: (row.reached.calls, row.reached.held or 0) for row in rows if row.reached is not None}


# -- what users write


class Own(transformers.Trainer):
    """A mean of its own, which nobody divides: the class believes that its model does."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss


class OwnDivided(Own):
    """The same, said."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.model_accepts_loss_kwargs = False


class OwnShare(transformers.Trainer):
    """A sum of its own over the window's tokens."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any) -> Any:
        labels = inputs["labels"][:, 1:]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / num_items_in_batch


class Emptied(transformers.Trainer):
    """`zero_grad` in each micro-batch."""

    def training_step(self, model: Any, *given: Any, **named: Any) -> Any:
        model.zero_grad()
        return super().training_step(model, *given, **named)


class Twice(transformers.Trainer):
    """Divides once more."""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        return super().compute_loss(*given, **named) / self.current_gradient_accumulation_steps


class Stale(transformers.Trainer):
    """Adds to a gradient what no micro-batch has."""

    def training_step(self, model: Any, *given: Any, **named: Any) -> Any:
        made = super().training_step(model, *given, **named)
        model.lm_head.weight.grad.add_(0.01)
        return made


class Replaced(transformers.Trainer):
    """A head that the optimizer does not have."""

    def create_optimizer(self, *given: Any, **named: Any) -> Any:
        made = super().create_optimizer(*given, **named)
        self.model.lm_head = torch.nn.Linear(16, hf_trainer.VOCABULARY, bias=False)
        return made


class Detached(transformers.Trainer):
    """Half of the loss has no gradient."""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        loss = super().compute_loss(*given, **named)
        return loss / 2 + loss.detach() / 2


class Counts(transformers.Trainer):
    """A loss that is another one in each call."""

    calls = 0

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        Counts.calls += 1
        return super().compute_loss(*given, **named) * Counts.calls


class Logs(transformers.Trainer):
    """Does nothing to the loss."""

    def training_step(self, *given: Any, **named: Any) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        return super().training_step(*given, **named)


USERS = (Own, OwnDivided, OwnShare, Emptied, Twice, Stale, Replaced, Detached, Counts, Logs)


def of_users(kind: type) -> dict[str, Any]:
    """A Llama of the hunt in a user's trainer."""
    found: list[Relation] = []

    def use(trainer: Any) -> None:
        config = trainer.model.config
        config.hidden_size = 16
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config)
        own = kind(model, trainer.args, train_dataset=trainer.train_dataset, data_collator=trainer.data_collator)
        found.extend(rehearsed(own))

    build("transformers/llama", use)
    return {each.name: each.as_json() for each in found}


# -- the run that goes on


def goes_on(name: str, **settings: Any) -> list[Any]:
    """What a run comes to: by itself, going on from a rehearsal, and begun after one that stopped (not of shards).

    Bits of weights, random numbers and the log.
    """
    found: list[Any] = []

    def use(trainer: Any) -> None:
        random.seed(1)
        numpy.random.seed(1)
        if len(found) == 1:
            relations: list[Relation] = []
            with Rehearsal(trainer, relations.extend, goes_on=True).begun():
                trainer.train()
            assert relations
        elif len(found) == 2:
            assert rlhf_patches.rehearse(trainer)
            trainer.train()
        else:
            trainer.train()
        with sharded.gathered(trainer):
            weights = [float(sharded.full(each).double().sum()).hex() for each in trainer.model.parameters()]
        drawn = [torch.rand(2).tolist(), random.random(), float(numpy.random.rand())]
        log = [{key: value for key, value in entry.items() if "loss" in key} for entry in trainer.state.log_history]
        found.append([weights, drawn, log])

    for _ in range(2 if "sharding" in settings else 3):
        build(name, use, **{"accumulation": 2, "steps": 3, "dropout": 0.1, "rows": 16, **settings})
    return found


def of_this_process() -> int:
    """How many ranks it is one of; alone it has no launcher's variables."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # of what the fork server has loaded
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    return ranks


def main() -> None:
    parser = states.parser()
    parser.add_argument("what", choices=("off", "on", "users", "go-on"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--variant", default="as it is", help="one of them, or some: zero3, dropout")
    options = parser.parse_args()
    os.chdir(options.out)
    ranks = of_this_process()
    rank = os.environ.get("RANK", "0")
    settings = {key: value for each in options.variant.split(", ") for key, value in VARIANTS[each].items()}
    if options.what in PATCHES:
        found: Any = {name: table(name, options.what, ranks, **settings) for name in options.names}
    elif options.what == "users":
        found = {kind.__name__: of_users(kind) for kind in USERS}
    else:
        found = {name: goes_on(name, ranks=ranks, **settings) for name in options.names}
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
