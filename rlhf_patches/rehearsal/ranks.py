"""The gradients that each rank measures in its window, and the correct weights over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from .labels import LABELS, PREDICTED

_EQUAL = "the mean over micro-batches"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Generations:
    """Rollouts that are split into micro-batches, for a loss that is a sum over tokens.

    Args:
        size: the number of micro-batches in one generation.
        tokens: the number of trained tokens in each micro-batch of the window.
        totals: the generation's number of tokens, as each micro-batch's inputs give it.
    """

    size: int
    tokens: tuple[float, ...]
    totals: tuple[float, ...]


@dataclass(frozen=True)
class Mine:
    """The measurements of one rank.

    Args:
        used: the window's gradient, as a sketch.
        own: the micro-batches' own gradients, one row each.
        evenly: the part of ``own`` that is always a mean over micro-batches; None if there is none.
        counts: the possible weights of the micro-batches, by name.
        noise: the rounding error of a repeated gradient.
        carries: whether each micro-batch's inputs give the number that divides the window's loss.
        generations: set if that number counts a generation's tokens; ``own`` is then divided by each micro-batch's.
        problem: why there are no measurements.
        by: the user's code that may change the gradient before the step.
    """

    used: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    own: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    evenly: torch.Tensor | None = None
    counts: dict[str, list[float]] = field(default_factory=dict)
    noise: float = 0.0
    carries: bool = False
    generations: Generations | None = None
    problem: str = ""
    by: str = ""

    def only(self, place: int) -> Mine:
        """Return a copy with only one micro-batch."""
        counts = {name: [each[place]] for name, each in self.counts.items()}
        evenly = None if self.evenly is None else self.evenly[place : place + 1]
        return replace(self, own=self.own[place : place + 1], evenly=evenly, counts=counts, generations=None)


def number() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    from torch import distributed

    initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialized else 1


def gathered(mine: _T) -> list[_T]:
    """Gather what all ranks give, such as their measurements, in rank order. Every rank must call it."""
    from torch import distributed

    if number() == 1:
        return [mine]
    of_ranks: list[Any] = [None] * number()
    distributed.all_gather_object(of_ranks, mine)
    return of_ranks


def problem(of_ranks: list[Mine]) -> str:
    """Return the first rank's problem; empty if no rank has one."""
    return next((each.problem for each in of_ranks if each.problem), "")


def laws(of_ranks: list[Mine]) -> dict[str, list[float]]:
    """Return the correct weights by name; a window's gradient is the mean over ranks."""
    generations = [each.generations for each in of_ranks if each.generations is not None]
    if len(generations) == len(of_ranks):
        return {"the mean over the generation's tokens": _shares(generations)}
    numbers = [len(each.own) for each in of_ranks]
    ranks = len(of_ranks)
    by_name = {_EQUAL: [1 / number / ranks for number in numbers for _ in range(number)]}
    names = set.intersection(*(set(each.counts) for each in of_ranks))
    for name in sorted(names):
        total = sum(sum(each.counts[name]) for each in of_ranks)
        shares = [count / total for each in of_ranks for count in each.counts[name]]
        if all(map(_near, shares, by_name[_EQUAL])):
            continue
        by_name[f"the mean over {name}"] = shares
        if ranks > 1:
            by_name[f"the mean over {name} on each rank"] = [
                count / sum(each.counts[name]) / ranks for each in of_ranks for count in each.counts[name]
            ]
    if all(each.carries for each in of_ranks):
        by_name["the window's num_items_in_batch"] = [1 / ranks] * sum(numbers)
    return by_name


def _shares(of_ranks: list[Generations]) -> list[float]:
    """Return the weights of a mean over generations, each a mean over its tokens.

    For a generation that extends beyond the window, the run's own count is used.
    """
    size, number = of_ranks[0].size, len(of_ranks[0].tokens)
    shares = []
    for each in of_ranks:
        for place, count in enumerate(each.tokens):
            first = place // size * size
            whole = first + size <= number
            total = sum(sum(rank.tokens[first : first + size]) for rank in of_ranks)
            shares.append(count / ((total if whole else each.totals[place]) or 1.0) * size / number)
    return shares


def counts_what_nothing_predicts(of_ranks: list[Mine], factor: float, noise: float) -> bool:
    """Whether the factor comes from a count of all labels; a causal model predicts all but the first."""
    totals = [sum(sum(each.counts.get(name, ())) for each in of_ranks) for name in (PREDICTED, LABELS)]
    return totals[0] < totals[1] and abs(factor - totals[0] / totals[1]) < max(1e-4, noise)


def _near(one: float, other: float) -> bool:
    return abs(one - other) < 1e-9
