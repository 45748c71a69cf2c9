"""Every trainer on ``transformers.Trainer``, rehearsed in drawn configurations with the patches on (docs/rehearse.md).

No relation deviates, but where reasons.toml says which bug it is that no patch repairs.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hunt import cells, check_patches, hf_trainer, sharded
from hunt.cells import CANNOT, HOLDS, KNOWN, NEW
from hunt.check_patches import Configuration
from hunt.outcomes import Outcome
from hunt.runs import Run, Runner
from hunt.trainers import CannotRun, Trainer
from hunt.worker import ON

FRAMEWORKS = ("transformers", "trl", "trl_prm", "liger")
"""Those whose trainers are run by `hf_trainer.outcome`, which hands them over."""
GRID: dict[str, tuple[Any, ...]] = {
    "dropout": (0.0, 0.1),
    "dtype": ("float32", "bfloat16"),
    "bf16": (False, True),
    "attention": ("eager", "sdpa"),
    "checkpointing": (False, True),
    "lora": (False, True),
    "accumulation": (1, 2, 4),
    "ranks": (1, 2),
    "packing": (False, True),
    "padding_free": (False, True),
    "sharding": (None, *sharded.KINDS),
}
NOT_CHECKED = "not checked"
PART = "rehearsed"


def configurations(trainer: Trainer) -> Iterator[Configuration]:
    """The same ones every time, plain first; one more than the trainer takes settings of the grid."""
    if trainer.framework in FRAMEWORKS:
        every = check_patches.configurations(trainer, 1 + sum(name in trainer.takes for name in GRID), GRID)
        yield from (each for each in every if each.settings.get("by") != "formula")


@dataclass(frozen=True)
class Rehearsed:
    """What became of a configuration.

    Attributes:
        kind: HOLDS, KNOWN, NEW, NOT_CHECKED (the first relation), or CANNOT.
        holds: how many relations hold.
        notes: the relations with a note.
        words: the deviations, or why it was not checked.
    """

    kind: str
    holds: int = 0
    notes: tuple[str, ...] = ()
    words: str = ""


@dataclass(frozen=True)
class Reason:
    """An entry of reasons.toml: a deviation of a bug that no patch repairs.

    Attributes:
        configurations: globs of names.
        relation: its name.
        text: what is in its text.
        why: one line.
    """

    configurations: Sequence[str]
    relation: str
    text: str
    why: str


def reasons() -> list[Reason]:
    """Those of reasons.toml."""
    return [
        Reason(entry["configurations"], entry["relation"], entry["text"], " ".join(entry["why"].split()))
        for entry in cells.read(cells.REASONS).get("rehearse", [])
    ]


def judge(configuration: Configuration, release: str | None, runner: Runner, known: Sequence[Reason]) -> Rehearsed:
    """Rehearse it, with every patch on."""
    run = Run(configuration.trainer.name, release, dict(configuration.settings), ON, rehearsed=True)
    result = runner.ask(run).result()
    if result.cannot:
        return Rehearsed(CANNOT, words=result.cannot)
    if result.outcome is None:
        by_itself = runner.ask(Run(run.trainer, release, run.settings, ON)).result()
        failed = f"as without a rehearsal: {result.failed}"
        return (
            Rehearsed(CANNOT, words=failed) if by_itself.outcome is None else Rehearsed(NEW, words=f"{result.failed}")
        )
    return judged(configuration.name, result.outcome[PART], known)


def judged(name: str, relations: Mapping[str, Any], known: Sequence[Reason]) -> Rehearsed:
    """What a configuration's table says."""
    rows = [json.loads(row) for row in relations.values()]
    holds = sum(row["verdict"] == "holds" for row in rows)
    notes = tuple(row["relation"] for row in rows if row["verdict"] == "note")
    words, kind = [], HOLDS
    for row in rows:
        if row["verdict"] == "deviates":
            why = next((each.why for each in known if _is(each, name, row)), None)
            kind = NEW if why is None else KNOWN if kind == HOLDS else kind
            words.append(f"{row['relation']} {row['measured']}: {row['text']}" + (f": {why}" if why else ""))
    if kind == HOLDS and rows[0]["verdict"] == "not checked":
        return Rehearsed(NOT_CHECKED, holds, notes, rows[0]["text"])
    return Rehearsed(kind, holds, notes, "; ".join(words))


def _is(reason: Reason, name: str, row: Mapping[str, str]) -> bool:
    of_it = row["relation"] == reason.relation and reason.text in row["text"]
    return of_it and any(fnmatch.fnmatchcase(name, glob) for glob in reason.configurations)


# -- on each rank


def outcome(run: Callable[[], Outcome]) -> Outcome:
    """Each relation's row, of the trainer that the adapter makes."""
    found: dict[str, str] = {}

    def use(trainer: Any) -> Outcome:
        found.update({each.name: json.dumps(each.as_json()) for each in relations(trainer)})
        return {}

    with hf_trainer.handed_to(use):
        run()
    if not found:
        raise CannotRun("it makes no transformers.Trainer")
    return {PART: found}


def relations(trainer: Any, little: bool = False) -> list[Any]:
    """As the command has it, but that the process goes on; ``little``: with ``--memory low``."""
    from rlhf_patches.rehearsal.trainer import Ended, Rehearsal

    found: list[Any] = []

    def end(made: list[Any]) -> None:
        found.extend(made)
        raise Ended(0)

    with Rehearsal(trainer, end, little=little).begun(), contextlib.suppress(Ended):
        trainer.train()
    return found
