"""Starts a rehearsal: of a given ``transformers.Trainer``, of what trains first, or of a framework's engines."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import api, ranks, settings
from ..definitions.status import Status
from ..engine import import_hooks
from . import table, time_limit
from .relation import Relation, Verdict, not_checked
from .results import write_results

if TYPE_CHECKING:
    from .labels import Trained
    from .loop import LoopRehearsal

_MODULE = "transformers.trainer"
_OPENRLHF = "openrlhf_trainer:TrainerRehearsal"
_ENGINES = {
    "verl.workers.engine.base": ("verl_engine:EngineRehearsal", (("BaseEngine", "train_batch"),)),
    "openrlhf.trainer.ray.ppo_actor": (_OPENRLHF, (("ActorPPOTrainer", "ppo_train"),)),
    "openrlhf.trainer.ray.ppo_critic": (_OPENRLHF, (("CriticPPOTrainer", "ppo_train"),)),
    "skyrl.backends.skyrl_train.workers.worker": (
        "skyrl_worker:WorkerRehearsal",
        (("PolicyWorkerBase", "forward_backward"), ("CriticWorkerBase", "forward_backward")),
    ),
}
"""By module: the adapter, and the methods that train on a mini-batch."""
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_LAYOUTS = ("megatron.core.parallel_state", "megatron.core.model_parallel_config")
_LOOPS = "torch"
_began = False
_loop: LoopRehearsal | None = None
_rehearsed: set[str] = set()
"""The classes of engines whose first mini-batch was checked."""


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
    """Rehearse what trains first in this process (RLHF_PATCHES_REHEARSE): a Trainer, an engine, or a loop."""
    engines = ((each, _wrap_engines) for each in _ENGINES)
    wraps = ((_MODULE, _wrap), *engines, (_SCHEDULES, _wrap_schedules), (_LOOPS, _wrap_loops))
    if settings.OTHER_LAYOUT in settings.rehearse():
        wraps = ((_SCHEDULES, _wrap_schedules), *((each, _wrap_layout) for each in _LAYOUTS))
    for name, wrap in wraps:
        module = sys.modules.get(name)
        if module is not None and import_hooks.is_ready(module):
            wrap(name, module)
        else:
            import_hooks.watch(name, wrap)


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
        _leave_loops()
        from .trainer import Ended, Rehearsal

        asked = settings.rehearse()
        goes_on, first = "go-on" in asked, self.args.process_index == 0

        def end(relations: list[Relation]) -> None:
            limit.cancel()
            size = f"first window of {rehearsal.size}"
            status = _publish(type(self).__name__, size, relations, rehearsal.trained_on, first)
            if not goes_on:
                raise Ended(status)

        rehearsal = Rehearsal(self, end, goes_on=goes_on, saves="save" in asked, little=settings.MEMORY_LOW in asked)
        with (
            _limited(type(self).__name__, first) as limit,
            rehearsal.begun(),
            _nothing_reported(self, unless=goes_on),
        ):
            return original(self, *arguments, **named)

    train._rehearses = True  # type: ignore[attr-defined]
    module.Trainer.train = train


def _wrap_engines(name: str, module: ModuleType) -> None:
    """Check the first mini-batch of each engine, trainer or worker before it trains on it."""
    adapter, methods = _ENGINES[name]
    for owner, method in methods:
        kind = getattr(module, owner, None)
        if method in vars(kind or type) and not hasattr(getattr(kind, method), "_rehearses"):
            setattr(kind, method, _rehearsing(getattr(kind, method), adapter))


def _rehearsing(original: Callable[..., Any], adapter: str) -> Callable[..., Any]:
    """Return the method, with a rehearsal of the first mini-batch of each class before it."""

    @functools.wraps(original)
    def train(self: Any, *given: Any, **named: Any) -> Any:
        if type(self).__name__ in _rehearsed:
            return original(self, *given, **named)
        _rehearsed.add(type(self).__name__)
        _leave_loops()
        from .trainer import Ended

        module, _, kind = adapter.partition(":")
        rehearsal = getattr(importlib.import_module(f"{__package__}.{module}"), kind)(self, *given, **named)
        # A critic's mini-batch comes before the actor's, with which the rehearsal ends.
        rehearsal.ends = "go-on" not in settings.rehearse() and not rehearsal.of_a_critic
        relations, size = rehearsal.relations(), rehearsal.size
        status = _publish(rehearsal.name, size, relations, None, ranks.place().rank in (None, "0"))
        if rehearsal.ends:
            raise Ended(status)
        return original(self, *given, **named)

    train._rehearses = True  # type: ignore[attr-defined]
    return train


def _wrap_schedules(name: str, module: ModuleType) -> None:
    """Follow the first window of megatron-core that trains, and the step after it."""
    from .megatron_core import MegatronRehearsal, interposed
    from .trainer import Ended

    asked = settings.rehearse()
    goes_on = "go-on" in asked

    def end(of: str, size: str, relations: list[Relation]) -> None:
        status = _publish(of, size, relations, None, ranks.place().rank in (None, "0"))
        if not goes_on:
            raise Ended(status)

    def begin() -> MegatronRehearsal | None:
        global _began
        if not _began and not rehearsal.begun:
            _began = rehearsal.begun = True
            _leave_loops()
        return rehearsal if rehearsal.begun else None

    rehearsal = MegatronRehearsal(
        end, goes_on=goes_on, against=settings.against(), second=settings.OTHER_LAYOUT in asked
    )
    interposed(module, begin)


def _wrap_layout(name: str, module: ModuleType) -> None:
    """Have the script's model in another layout."""
    from .megatron_layout import wrapped

    wrapped(module, settings.against())


def _wrap_loops(name: str, module: ModuleType) -> None:
    """Follow the first training loop of the process, unless a trainer or an engine begins before it."""
    global _loop
    if _loop is not None or _began:
        return
    from .loop import LoopRehearsal
    from .trainer import Ended

    goes_on = "go-on" in settings.rehearse()
    at_exit = False

    def end(of: str, size: str, relations: list[Relation]) -> None:
        global _began
        _began = True
        status = _publish(of, size, relations, loop.trained_on, ranks.place().rank in (None, "0"))
        if not goes_on and not at_exit:
            raise Ended(status)

    def ends() -> None:
        nonlocal at_exit
        at_exit = True
        if loop.took_a_step:
            loop.finish()

    loop = _loop = LoopRehearsal(module, end, goes_on=goes_on)
    loop.begin()
    atexit.register(ends)


@contextlib.contextmanager
def _limited(name: str, first: bool) -> Iterator[time_limit.Limit]:
    """Limit the time of a rehearsal within the context, until its end."""
    seconds = settings.time_limit()

    def expired(relation: str) -> None:
        if first:
            why = f"the time limit of {seconds:g} s ended the rehearsal here"
            _publish(name, "not complete", [not_checked(relation, why)], None, first)

    limit = time_limit.Limit(seconds, expired, first=first)
    try:
        yield limit
    finally:
        limit.cancel()


def _leave_loops() -> None:
    if _loop is not None:
        _loop.leave()


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


def _publish(name: str, size: str, relations: list[Relation], trained_on: Trained | None, first: bool) -> int:
    """Print the table on rank 0, write it for the command if it started this run, and return the exit status."""
    status, path = exit_status(relations), os.environ.get(f"{settings.PREFIX}REHEARSED")
    writes = path is not None and (first or ranks.place().local_rank == "0")
    met, ran = acted() if first or writes else ({}, [])
    if first:
        text = ["", f"rlhf-patches rehearse: {name}, {size}", *table.lines(relations)]
        text += ["", *(f"repaired: {patch}{how}" for patch, how in met.items())] if met else []
        text += [f"patches whose code ran, bug condition unknown: {', '.join(ran)}"] if ran else []
        if trained_on is not None:
            colors = sys.stdout.isatty()
            text += ["", "first row, tokens with a label in " + ("green:" if colors else "[brackets]:")]
            text += table.trained_on(trained_on, colors)
        print("\n".join(text), flush=True)
    if path is not None and writes:
        rows = [{"of": name, **each.as_json()} for each in relations]
        shown = [] if trained_on is None else [{"of": name, **trained_on.as_json()}]
        try:
            found = {"status": status, "relations": rows, "trained_on": shown}
            write_results(path, name, found, met, ran, first=first)
        except OSError as error:  # Ray may have started this worker on another node
            print(f"rlhf-patches rehearse: the command does not get these results: {error}", flush=True)
            return status
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
