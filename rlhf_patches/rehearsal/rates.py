"""Learning rates: a scheduler scales the learning rates of all parameter groups by one factor."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from ..definitions.words import plural
from . import states
from .relation import Relation, Verdict, not_checked

NAME = "learning rates"
_STEPS = 4
_SAME = 1e-6


def of_groups(optimizer: Any) -> list[float] | None:
    """Return the learning rates before any schedule of groups that have parameters; None if there are no groups."""
    groups = getattr(optimizer, "param_groups", None)
    return [float(each.get("initial_lr", each["lr"])) for each in groups if each["params"]] if groups else None


def relation(optimizer: Any, scheduler: Any, rates: Sequence[float] | None, most: int) -> Relation:
    """Take the scheduler's next steps, and restore it.

    Args:
        optimizer: the trainer's optimizer.
        scheduler: the trainer's scheduler.
        rates: `of_groups` before the scheduler was made; None if unknown.
        most: the number of steps of the run.
    """
    inner = getattr(scheduler, "scheduler", scheduler)
    groups = getattr(optimizer, "param_groups", None) or []
    filled = [each for each in groups if each["params"]]
    if rates is None or len(rates) != len(filled):
        return not_checked(NAME, "the parameter groups' learning rates before the schedule are not known")
    if not hasattr(inner, "step") or "Plateau" in type(inner).__name__ or "Dummy" in type(inner).__name__:
        return not_checked(NAME, f"{type(inner).__name__} cannot be stepped in advance")
    seen: list[list[float]] = []
    with _restored(inner, groups), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects a step of the optimizer first
        for _ in range(max(1, min(_STEPS, most))):
            try:
                inner.step()
            except ValueError as error:
                text = f"step {len(seen) + 1} of {type(inner).__name__} raises ValueError: {error}"
                return Relation(NAME, Verdict.DEVIATES, _measured(rates), text)
            seen.append([float(each["lr"]) for each in filled])
    return judge(rates, seen)


def judge(rates: Sequence[float], seen: Sequence[Sequence[float]]) -> Relation:
    """Compare the groups' learning rates in some steps with those before the schedule."""
    for now in seen:
        factors = [lr / rate for lr, rate in zip(now, rates, strict=True) if rate]
        if factors and max(factors) - min(factors) > _SAME * max(map(abs, factors)):
            before, after = (" ".join(f"{each:.3g}" for each in numbers) for numbers in (rates, now))
            text = f"the schedule has no common factor: [{before}] become [{after}]"
            return Relation(NAME, Verdict.NOTE, _measured(rates), text)
    return Relation(NAME, Verdict.HOLDS, _measured(rates))


def _measured(rates: Sequence[float]) -> str:
    return plural(len(rates), "group", "groups")


@contextlib.contextmanager
def _restored(scheduler: Any, groups: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Restore a scheduler, those that it is made of, and the groups' settings after the context."""
    parts = [scheduler, *getattr(scheduler, "_schedulers", ())]
    kept = [states.Attributes(each) for each in parts]
    settings = [{name: value for name, value in each.items() if name != "params"} for each in groups]
    try:
        yield
    finally:
        for each in kept:
            each.put_back()
        for group, own in zip(groups, settings, strict=True):
            for name in [name for name in group if name != "params" and name not in own]:
                del group[name]
            group.update(own)
