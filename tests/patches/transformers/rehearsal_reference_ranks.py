"""Runs with a reference, with checkpointing, compiled, or with a data loader of their own, for a rehearsal."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader

from rlhf_patches.proving import states
from rlhf_patches.rehearsal.relation import Relation
from tests.patches.transformers import rehearsal_ranks as runs

Use = Callable[[Any], None]
LORA = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)


def preferences(
    make: str = "llama", reference: str = "equal", adapted: bool = False, around: Any = None, **settings: Any
) -> Callable[[Use], None]:
    """DPO of a tiny model; ``adapted``: of one whose adapter was trained before."""

    def build(use: Use) -> None:
        from datasets import Dataset
        from trl import DPOConfig, DPOTrainer

        from rlhf_patches.patches.trl.proofs import functional_dropout_ranks as models
        from rlhf_patches.patches.trl.proofs import small

        torch.manual_seed(0)
        policy: Any = getattr(models, make)()
        other = copy.deepcopy(policy)
        if adapted:
            policy = get_peft_model(policy, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        if reference == "other":
            with torch.no_grad():
                next(other.parameters()).mul_(1.1)
        lora = settings.pop("lora", None)
        kind = DPOTrainer if around is None else around(DPOTrainer)
        options = {**small.STEPS, "output_dir": states.folder(), "per_device_train_batch_size": 2, **settings}
        use(
            kind(
                policy,
                None if reference == "none" else other,
                args=DPOConfig(**options),
                train_dataset=Dataset.from_list(models.ROWS),
                processing_class=small.tokenizer(),
                **({"peft_config": lora} if lora else {}),
            )
        )

    return build


def with_own_loss(kind: type) -> type:
    """A trainer with a loss of its own."""

    class Own(kind):
        def compute_loss(self, *given: Any, **named: Any) -> Any:
            return super().compute_loss(*given, **named) * 2

    return Own


def changed(does: Callable[[Any], Any], name: str = "transformers/llama", **settings: Any) -> Callable[[Use], None]:
    """A trainer of the hunt that is changed before it trains."""

    def build(use: Use) -> None:
        def to_be_used(trainer: Any) -> None:
            does(trainer)
            use(trainer)

        runs.build(name, to_be_used, **settings)

    return build


def recomputed_otherwise(trainer: Any) -> None:
    """Checkpointing draws other dropout masks when it computes again."""
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        setattr(trainer.args, name, {"use_reentrant": False, "preserve_rng_state": False})


def compiled_wrongly(trainer: Any) -> None:
    """A compiler that gets a factor wrong."""

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        def wrong(*given: Any) -> Any:
            made = graph(*given)
            return tuple(each * 1.01 if each.requires_grad else each for each in made)

        return wrong

    trainer.model.compile(backend=backend)


def compiled(trainer: Any) -> None:
    trainer.model.compile(backend="eager")


class Unprepared(transformers.Trainer):
    """Reads the same rows on each rank."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, 2, collate_fn=self.data_collator)


class Prepared(transformers.Trainer):
    """The same, given to accelerate."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, 2, collate_fn=self.data_collator))


def drops(trainer: Any) -> None:
    trainer.args.dataloader_drop_last = True


def of_kind(kind: type) -> Callable[[Any], None]:
    return lambda trainer: setattr(trainer, "__class__", kind)


CASES: dict[str, Callable[[Use], None]] = {
    "equal": preferences(),
    "IPO": preferences(loss_type="ipo"),
    "two losses": preferences(loss_type=["sigmoid", "hinge"], loss_weights=[1.0, 0.5]),
    "unknown loss": preferences(loss_type="discopop"),
    "weighted": preferences(use_weighting=True),
    "another reference": preferences(reference="other"),
    "new adapter": preferences(reference="none", lora=LORA),
    "adapter trained before": preferences(reference="none", adapted=True),
    "own loss": preferences(around=with_own_loss),
    "dropout kept": preferences("opt", disable_dropout=False),
    "checkpointing": changed(lambda _: None, checkpointing=True, dropout=0.1),
    "reentrant": changed(lambda _: None, "trl/sft", checkpointing="reentrant", dropout=0.1, lora=True),
    "little memory": changed(lambda _: None, checkpointing=True),
    "recomputed otherwise": changed(recomputed_otherwise, checkpointing=True, dropout=0.1),
    "compiled": changed(compiled),
    "compiled wrongly": changed(compiled_wrongly),
    "drops": changed(drops, micro_batch=3, accumulation=2),
    "same rows": changed(of_kind(Unprepared), accumulation=2, ranks=2, rows=16),
    "other rows": changed(of_kind(Prepared), accumulation=2, ranks=2, rows=16),
}


def switches_of(trainer: Any) -> list[Any]:
    """What checkpointing has set in each module."""
    named = ("gradient_checkpointing", "_gradient_checkpointing_func", "_forward_hooks", "training")
    return [[repr(vars(module).get(name)) for name in named] for module in trainer.model.modules()]


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

        def use(trainer: Any, case: str = case, into: list[Relation] = relations) -> None:
            step, before = trainer.training_step, []

            def noting(*given: Any, **named: Any) -> Any:  # checkpointing is enabled in train()
                before.append(switches_of(trainer))
                return step(*given, **named)

            trainer.training_step = noting
            into.extend(runs.rehearsed(trainer, case == "little memory"))
            assert switches_of(trainer) == before[0]

        CASES[case](use)
        found[case] = {each.name: each.as_json() for each in relations}
    (options.out / f"rank{rank}.json").write_text(json.dumps(found))
