"""The checkpoint after the first step: what the trainer saves and loads again is what was trained, bit for bit."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from . import pieces, ranks, sharding
from .parameters import shown
from .relation import Relation, Verdict, not_checked
from .states import copy_of

NAME = "checkpoint"
_BESIDE_WEIGHTS = 2
"""Adam's two states in float32, relative to the weights in float32."""
_ROUNDED = "the saved weights are coarser"
_RELEASED = ("transformers.", "trl.", "swift.", "accelerate.", "rlhf_patches.")
_USES = ("_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler")


def cannot(trainer: Any, where: sharding.Whole) -> str:
    """Return why no checkpoint can be tried; empty if one can."""
    if type(where) is not sharding.Whole:
        return f"weights or optimizer are sharded ({type(where).__name__})"
    if missing := [name for name in _USES if not hasattr(trainer, name)]:
        return f"{type(trainer).__name__} has no {missing[0]}"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or trainer.args.world_size
    if local < trainer.args.world_size:
        return "the run's nodes share no temporary folder"
    whole = sum(each.numel() * each.element_size() for each in where.named.values())
    trained = sum(each.numel() * 4 for each in where.parameters)
    needed, free = whole + _BESIDE_WEIGHTS * trained, shutil.disk_usage(tempfile.gettempdir()).free
    if needed > free / 2:
        return f"it needs {needed / 1e9:.0f} GB in {tempfile.gettempdir()}, where {free / 1e9:.0f} GB are free"
    return ""


class AfterStep:
    """Calls a function at the end of the trainer's step, by a callback.

    Args:
        trainer: a ``transformers.Trainer``.
        does: called once.
    """

    def __init__(self, trainer: Any, does: Callable[[], None]) -> None:
        import transformers

        class Callback(transformers.TrainerCallback):  # type: ignore[misc]
            def on_step_end(_, *given: Any, **named: Any) -> None:
                self.off()
                does()

        self._handler, self._callback = trainer.callback_handler, Callback()
        self._handler.callbacks.append(self._callback)

    def off(self) -> None:
        """Remove the callback."""
        if self._callback in self._handler.callbacks:
            self._handler.callbacks.remove(self._callback)


def relation(trainer: Any, where: sharding.Whole, loss: Callable[[], float]) -> Relation:
    """Save a checkpoint, overwrite what was trained, and load it. Every rank must call it. All is restored.

    Args:
        trainer: a ``transformers.Trainer`` after an optimizer step.
        where: where the trainer's parameters are.
        loss: computes a micro-batch's loss, the same each time.
    """
    mine = ranks.gathered(ranks.Mine(problem=cannot(trainer, where)))
    if why := ranks.problem(mine):
        return not_checked(NAME, why)
    made = tempfile.mkdtemp(prefix="rlhf-patches-rehearse-") if trainer.args.process_index == 0 else ""
    folder = ranks.gathered(ranks.Mine(by=made))[0].by
    try:
        of_ranks = ranks.gathered(ranks.Mine(problem=_wrong(trainer, where, loss, folder)))
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)
    names = f"{len(where.parameters)} trained"
    if why := ranks.problem(of_ranks):
        by = saved_by(trainer)
        if by or why.startswith(_ROUNDED):
            return Relation(NAME, Verdict.NOTE, names, f"{why}; {by} may do that on purpose" if by else why)
        return Relation(NAME, Verdict.DEVIATES, names, why)
    only = "of the model only (save_only_model)" if _only_model(trainer) else ""
    return Relation(NAME, Verdict.HOLDS, names, only)


def saved_by(trainer: Any) -> str:
    """Return the user's method that saves or loads; empty if there is none."""
    for name in (*_USES, "save_model", "_save"):
        function = getattr(type(trainer), name, None)
        if function is not None and not pieces.written_in(function).startswith(_RELEASED):
            return f"{type(trainer).__name__}.{name}"
    return ""


def _only_model(trainer: Any) -> bool:
    return bool(getattr(trainer.args, "save_only_model", False))


def _wrong(trainer: Any, where: sharding.Whole, loss: Callable[[], float], folder: str) -> str:
    """Return what is wrong with the checkpoint; empty if nothing is."""
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    before, kept = loss(), [each.detach().cpu().clone() for each in where.parameters]
    states = copy_of(optimizer.state_dict()), copy_of(scheduler.state_dict())
    try:
        with _into(trainer.args, folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            problem = _attempt("it cannot be saved", lambda: trainer._save_checkpoint(trainer.model, None))
            problem = ranks.problem(ranks.gathered(ranks.Mine(problem=problem)))  # also: all files are there
            if problem:
                return problem
            _overwrite(where, optimizer, scheduler, keeps=_only_model(trainer))
            path = os.path.join(folder, f"checkpoint-{trainer.state.global_step}")
            if problem := _attempt("it does not load", lambda: _load(trainer, path)):
                return problem
        lost = [name for name, at, value in _pairs(where, kept) if not _equal(at.detach().cpu(), value)]
        if lost and all(_rounded(at.detach().cpu(), value) for _, at, value in _pairs(where, kept)):
            return f"{_ROUNDED} than the trained ones: {shown(lost)}"
        if lost:
            return f"{len(lost)} of the trained parameters are not as trained when it is loaded: {shown(lost)}"
        for name, now, saved in zip(
            ("optimizer", "scheduler"), (optimizer.state_dict(), scheduler.state_dict()), states, strict=True
        ):
            if not _equal(now, saved):
                return f"the {name}'s state is another one when it is loaded"
        after = loss()
        return "" if after == before else f"a micro-batch's loss is {before:.6g}, and {after:.6g} when it is loaded"
    finally:
        with torch.no_grad():
            for _, at, value in _pairs(where, kept):
                at.copy_(value)
        optimizer.load_state_dict(states[0])
        scheduler.load_state_dict(states[1])


def _pairs(where: sharding.Whole, kept: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    names = {id(each): name for name, each in where.named.items()}
    for at, value in zip(where.parameters, kept, strict=True):
        yield names[id(at)], at, value


def _overwrite(where: sharding.Whole, optimizer: Any, scheduler: Any, keeps: bool) -> None:
    with torch.no_grad():
        for each in where.parameters:
            each.fill_(float("nan"))
    if not keeps:
        for each in optimizer.state_dict()["state"].values():  # the tensors are the optimizer's own
            for value in each.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(7)
        getattr(scheduler, "scheduler", scheduler).last_epoch = -7


def _load(trainer: Any, path: str) -> None:
    trainer._load_from_checkpoint(path)
    trainer._load_optimizer_and_scheduler(path)


def _attempt(says: str, what: Callable[[], Any]) -> str:
    try:
        what()
    except Exception as error:  # the trainer's or the user's own
        return f"{says}: {type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _into(args: Any, folder: str) -> Iterator[None]:
    """Have checkpoints written to another folder, and nowhere else."""
    kept = {name: getattr(args, name) for name in ("output_dir", "push_to_hub") if hasattr(args, name)}
    try:
        args.output_dir = folder
        args.push_to_hub = False
        yield
    finally:
        for name, value in kept.items():
            setattr(args, name, value)


def _rounded(one: torch.Tensor, other: torch.Tensor) -> bool:
    return any(_equal(one, other.to(dtype).to(other.dtype)) for dtype in (torch.bfloat16, torch.float16))


def _equal(one: Any, other: Any) -> bool:
    """Whether two nested states are equal, bit for bit; a list equals a tuple."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return bool(torch.equal(one, other.to(one.device)))
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        same = isinstance(other, (list, tuple)) and len(one) == len(other)
        return same and all(map(_equal, one, other))
    return bool(one == other)
