"""Where a rehearsal begins: at the first training of a ``transformers.Trainer``, or of one that is handed over."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import api, settings
from ..definitions.status import Status
from ..engine import import_hooks
from . import table
from .relation import Relation, Verdict

if TYPE_CHECKING:
    from .trainer import Rehearsal

_MODULE = "transformers.trainer"
_began = False


def rehearse(trainer: Any) -> list[Relation]:
    """Hold a trainer's first window against itself, and stop before its first optimizer step.

    The trainer's ``train`` is called. Its weights and the random states are what they were; it can be trained after.

    Args:
        trainer: a ``transformers.Trainer`` or one of a class of it (TRL's, ms-swift's, your own).

    Returns:
        what was found of each relation; of the window the same on each rank.

    Raises:
        TypeError: it is another object.
        RuntimeError: its training ended before a window was complete.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not isinstance(trainer, module.Trainer):
        raise TypeError(f"rehearse takes a transformers.Trainer, not {type(trainer).__name__}")
    from .states import Random  # torch
    from .trainer import Ended, Rehearsal

    found: list[Relation] = []

    def end(relations: list[Relation]) -> None:
        found.extend(relations)
        raise Ended(0)

    before = Random.now()
    with Rehearsal(trainer, end).begun(), _nothing_reported(trainer), contextlib.suppress(Ended):
        trainer.train()
    before.put_back()
    for parameter in trainer.model.parameters():
        parameter.grad = None
    if not found:
        raise RuntimeError(f"{type(trainer).__name__}.train() ended before a window of micro-batches was complete")
    return found


def arm() -> None:
    """Rehearse the first ``Trainer.train`` of this process, as RLHF_PATCHES_REHEARSE asks for it."""
    module = sys.modules.get(_MODULE)
    if module is not None and import_hooks.is_ready(module):
        _wrap(_MODULE, module)
    else:
        import_hooks.watch(_MODULE, _wrap)


def _wrap(name: str, module: ModuleType) -> None:
    original = module.Trainer.train
    if hasattr(original, "_rehearses"):
        return

    @functools.wraps(original)
    def train(self: Any, *arguments: Any, **named: Any) -> Any:
        global _began
        if _began:
            return original(self, *arguments, **named)
        _began = True
        from .trainer import Ended, Rehearsal

        asked = settings.rehearse()
        goes_on = "go-on" in asked

        def end(relations: list[Relation]) -> None:
            status = _tell(self, rehearsal, relations)
            if not goes_on:
                raise Ended(status)

        rehearsal = Rehearsal(self, end, goes_on=goes_on)
        with rehearsal.begun(), _nothing_reported(self, unless=goes_on):
            return original(self, *arguments, **named)

    train._rehearses = True  # type: ignore[attr-defined]
    module.Trainer.train = train


@contextlib.contextmanager
def _nothing_reported(trainer: Any, unless: bool = False) -> Iterator[None]:
    """A trainer's callbacks without those that report to others (wandb, MLflow): by their module."""
    handler = trainer.callback_handler
    before = handler.callbacks
    if not unless:
        handler.callbacks = [
            each for each in before if type(each).__module__ != "transformers.integrations.integration_utils"
        ]
    try:
        yield
    finally:
        if not unless:
            handler.callbacks = before


def _tell(trainer: Any, rehearsal: Rehearsal, relations: list[Relation]) -> int:
    """Print the table on rank 0, and hand it to the command, if that started this run; the status of this process."""
    status, path = exit_status(relations), os.environ.get(f"{settings.PREFIX}REHEARSED")
    if trainer.args.process_index == 0:
        text = ["", f"rlhf-patches rehearse: {type(trainer).__name__}, the first window of {rehearsal.size}"]
        text += table.lines(relations)
        met, ran = acted()
        text += ["", *(f"repaired: {name}{how}" for name, how in met.items())] if met else []
        text += [f"ran, and cannot tell whether its bug was met: {', '.join(ran)}"] if ran else []
        if rehearsal.trained_on is not None:
            colours = sys.stdout.isatty()
            text += ["", "the first row, what has a label " + ("green:" if colours else "in [brackets]:")]
            text += table.trained_on(rehearsal.trained_on, colours)
        print("\n".join(text), flush=True)
        if path:
            with open(path, "w") as file:
                rows = [each.as_json() for each in relations]
                json.dump({"status": status, "relations": rows, "repaired": [*met], "ran": ran}, file)
    return 0 if path else status  # the command's own status says it


def acted() -> tuple[dict[str, str], list[str]]:
    """The patches whose bug this process has met so far, by how much, and those that ran and could not tell."""
    rows = [row for row in api.report() if row.status is Status.APPLIED and row.changes_numbers is not None]
    reached = {row.name: row.reached for row in rows if row.reached is not None and row.reached.calls}
    met = {name: each.by_how_much for name, each in reached.items() if each.held}
    return met, [name for name, each in reached.items() if name not in met and (each.asked or 0) < each.calls]


def exit_status(relations: list[Relation]) -> int:
    """0 where all that could be held holds, 1 where something deviates, 2 where the window could not be held."""
    if any(each.verdict is Verdict.DEVIATES for each in relations):
        return 1
    return 2 if relations and relations[0].verdict is Verdict.NOT_HELD else 0
