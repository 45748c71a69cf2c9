"""`rlhf-patches rehearse`: runs with a known bug, checked against themselves without the patches and with them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from cases import Case, Group, Row, Runner

from tests.harness.forkserver import TRL, Levels, beside, verl_workers

WINDOW, ADAPTERS, EVALUATION, SIZES = "micro-batch weights", "adapters", "evaluation loss", "micro-batch size"


@dataclass(frozen=True)
class Run:
    """A run of a tests' worker: the bug that it has, the case of the worker, and the relation that deviates."""

    patch: str
    case: str
    relation: str
    title: str
    release: str | None = None
    ranks: int = 1

    @property
    def shown(self) -> Case:
        return Case("rehearse", self.patch, self.title, f"`rehearse`, {self.title}")

    def levels(self) -> Levels:
        return beside(self.release, "trl") if self.release else TRL


RUNS = (
    Run("trl-online-dpo-accumulation", "online", WINDOW, "OnlineDPO: micro-batch weights"),
    Run("trl-grpo-dapo-scale", "two generations in a step", WINDOW, "GRPO: micro-batch weights", "trl-1.5"),
    Run("transformers-eval-loss", "evaluated", EVALUATION, "Trainer, 2 ranks: evaluation loss", ranks=2),
    Run("peft-adapter-freeze", "a frozen reference", ADAPTERS, "LoRA, frozen reference: adapters", "peft-0.18"),
    Run("peft-lora-merge-drift", "merged", ADAPTERS, "LoRA merged for vLLM: adapters", "peft-0.18"),
)
OF_VERL = (
    Run("verl-gmpo-micro-batches", "gmpo", SIZES, "GMPO: micro-batch size"),
    Run("verl-dr-grpo-length-bias", "dr-grpo", SIZES, "Dr.GRPO: micro-batch size"),
)


def of_a_trainer(run: Run, runner: Runner) -> Iterator[Row]:
    worker = "tests.patches.transformers.rehearsal_catalogue_ranks"
    found = runner.forked(worker, run.case, levels=run.levels(), ranks=run.ranks)[0][run.case]
    before, after = (found[patches][run.relation] for patches in ("off", "on"))
    yield row(run, before["verdict"], after["verdict"], run.release or "as installed")


def of_verl(runner: Runner) -> Iterator[Row]:
    worker = "tests.patches.verl.rehearsal_ranks"
    report = runner.forked(worker, levels=verl_workers(), TORCHDYNAMO_DISABLE="1")[0]
    for run in OF_VERL:
        before, after = (report[state][run.case]["relations"][run.relation] for state in ("without", "with"))
        yield row(run, before[0], after[0], "as installed")


def row(run: Run, before: str, after: str, release: str) -> Row:
    return Row(run.shown, release, before, after, "itself", (before, after) == ("deviates", "holds"))


GROUPS = tuple(Group((run.shown,), functools.partial(of_a_trainer, run)) for run in RUNS)
VERL_GROUPS = (Group(tuple(run.shown for run in OF_VERL), of_verl),)
