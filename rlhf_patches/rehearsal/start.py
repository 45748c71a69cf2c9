"""Starts a rehearsal: at the first ``train`` of a ``transformers.Trainer``, or for a given trainer."""

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
    """Check a trainer's first gradient accumulation window, and stop before the first optimizer step.

    It calls the trainer's ``train``. Weights and random states are unchanged afterwards; the trainer can still train.

    Args:
        trainer: a ``transformers.Trainer`` or an instance of a subclass (TRL's, ms-swift's, your own).

    Returns:
        the result of each relation; the window's are the same on each rank.

    Raises:
        TypeError: the argument is not a trainer.
        RuntimeError: the training ended before a window was complete.
    """
    module = sys.modules.get(_MODULE)
    if module is None or not isinstance(trainer, module.Trainer):
        raise TypeError(f"rehearse expects a transformers.Trainer, not a {type(trainer).__name__}")
    from .states import Random  # torch
    from .trainer import Ended, Rehearsal

    results: list[Relation] = []

    def end(relations: list[Relation]) -> None:
        results.extend(relations)
        raise Ended(0)

    before = Random.now()
    with Rehearsal(trainer, end).begun(), _nothing_reported(trainer), contextlib.suppress(Ended):
        trainer.train()
    before.put_back()
    for parameter in trainer.model.parameters():
        parameter.grad = None
    if not results:
        raise RuntimeError(f"{type(trainer).__name__}.train() ended before a window of micro-batches was complete")
    return results


def arm() -> None:
    """Rehearse the first ``Trainer.train`` of this process (RLHF_PATCHES_REHEARSE)."""
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
            status = _report(self, rehearsal, relations)
            if not goes_on:
                raise Ended(status)

        rehearsal = Rehearsal(self, end, goes_on=goes_on)
        with rehearsal.begun(), _nothing_reported(self, unless=goes_on):
            return original(self, *arguments, **named)

    train._rehearses = True  # type: ignore[attr-defined]
    module.Trainer.train = train


@contextlib.contextmanager
def _nothing_reported(trainer: Any, unless: bool = False) -> Iterator[None]:
    """Remove the callbacks that report to other services (wandb, MLflow) within the context."""
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


def _report(trainer: Any, rehearsal: Rehearsal, relations: list[Relation]) -> int:
    """Print the table on rank 0, write it for the command if it started this run, and return the exit status."""
    status, path = exit_status(relations), os.environ.get(f"{settings.PREFIX}REHEARSED")
    if trainer.args.process_index == 0:
        text = ["", f"rlhf-patches rehearse: {type(trainer).__name__}, first window of {rehearsal.size}"]
        text += table.lines(relations)
        met, ran = acted()
        text += ["", *(f"repaired: {name}{how}" for name, how in met.items())] if met else []
        text += [f"ran, bug condition unknown: {', '.join(ran)}"] if ran else []
        if rehearsal.trained_on is not None:
            colors = sys.stdout.isatty()
            text += ["", "first row, tokens with a label in " + ("green:" if colors else "[brackets]:")]
            text += table.trained_on(rehearsal.trained_on, colors)
        print("\n".join(text), flush=True)
        if path:
            with open(path, "w") as file:
                rows = [each.as_json() for each in relations]
                json.dump({"status": status, "relations": rows, "repaired": [*met], "ran": ran}, file)
    return 0 if path else status  # the command exits with the status


def acted() -> tuple[dict[str, str], list[str]]:
    """Return the patches whose bug occurred in this process, by how much, and those that ran without knowing it."""
    applied = [row for row in api.report() if row.status is Status.APPLIED]
    rows = [row for row in applied if row.changes_numbers is not None or row.harm.startswith("wrong")]
    reached = {row.name: row.reached for row in rows if row.reached is not None and row.reached.calls}
    met = {name: each.by_how_much for name, each in reached.items() if each.held}
    return met, [name for name, each in reached.items() if name not in met and (each.asked or 0) < each.calls]


def exit_status(relations: list[Relation]) -> int:
    """Return 0 if all checked relations hold, 1 if one deviates, 2 if the window could not be checked."""
    if any(each.verdict is Verdict.DEVIATES for each in relations):
        return 1
    return 2 if relations and relations[0].verdict is Verdict.NOT_CHECKED else 0
