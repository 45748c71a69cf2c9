"""What each rank has found of its window, and the weights that are right for all of them together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from .labels import LABELS, PREDICTED


@dataclass(frozen=True)
class Generations:
    """Rollouts that are divided into micro-batches, of a loss that is a sum over tokens.

    Args:
        size: how many micro-batches one generation makes.
        tokens: of each micro-batch of the window: how many are trained on.
        totals: what each of them brings as the number of its generation's.
    """

    size: int
    tokens: tuple[float, ...]
    totals: tuple[float, ...]


@dataclass(frozen=True)
class Mine:
    """Of one rank.

    Args:
        used: the window's gradient, as a sketch.
        own: the micro-batches' own, a row each.
        evenly: what of these is a mean over micro-batches whatever the law is; None where nothing is.
        counts: what a micro-batch may be weighted by, one number each, by what it is.
        noise: how far one and the same gradient moves by rounding.
        carries: whether each micro-batch brings the number that its window's loss is divided by.
        generations: where that is the number of a generation's tokens, and ``own`` is by those of each micro-batch.
        problem: why there is nothing of all that.
    """

    used: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    own: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    evenly: torch.Tensor | None = None
    counts: dict[str, list[float]] = field(default_factory=dict)
    noise: float = 0.0
    carries: bool = False
    generations: Generations | None = None
    problem: str = ""

    def only(self, place: int) -> Mine:
        """With one of its micro-batches."""
        counts = {name: [each[place]] for name, each in self.counts.items()}
        evenly = None if self.evenly is None else self.evenly[place : place + 1]
        return replace(self, own=self.own[place : place + 1], evenly=evenly, counts=counts, generations=None)


def gathered(mine: Mine) -> list[Mine]:
    """Of all ranks, in their order. Each rank has to call it."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return [mine]
    found: list[Mine | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return [each for each in found if each is not None]


def problem(of_ranks: list[Mine]) -> str:
    """The first one's; empty where there is none."""
    return next((each.problem for each in of_ranks if each.problem), "")


def laws(of_ranks: list[Mine]) -> dict[str, list[float]]:
    """The weights that are right, by what they are called; a window's gradient is the mean over ranks."""
    generations = [each.generations for each in of_ranks if each.generations is not None]
    if len(generations) == len(of_ranks):
        return {"a share by the tokens of its generation": _shares(generations)}
    numbers = [len(each.own) for each in of_ranks]
    ranks = len(of_ranks)
    found = {"one part for each micro-batch": [1 / number / ranks for number in numbers for _ in range(number)]}
    names = set.intersection(*(set(each.counts) for each in of_ranks))
    for name in sorted(names):
        total = sum(sum(each.counts[name]) for each in of_ranks)
        shares = [count / total for each in of_ranks for count in each.counts[name]]
        if all(map(_near, shares, found["one part for each micro-batch"])):
            continue
        found[f"a share by {name}"] = shares
        if ranks > 1:
            found[f"a share by {name} within its rank"] = [
                count / sum(each.counts[name]) / ranks for each in of_ranks for count in each.counts[name]
            ]
    if all(each.carries for each in of_ranks):
        found["the window's number, which each micro-batch brings"] = [1 / ranks] * sum(numbers)
    return found


def _shares(of_ranks: list[Generations]) -> list[float]:
    """The mean over generations, each a mean over its tokens; those beyond the window are as the run counted them."""
    size, number = of_ranks[0].size, len(of_ranks[0].tokens)
    found = []
    for each in of_ranks:
        for place, count in enumerate(each.tokens):
            first = place // size * size
            whole = first + size <= number
            total = sum(sum(rank.tokens[first : first + size]) for rank in of_ranks)
            found.append(count / ((total if whole else each.totals[place]) or 1.0) * size / number)
    return found


def counts_what_nothing_predicts(of_ranks: list[Mine], factor: float, noise: float) -> bool:
    """Whether a factor is that of a count of all labels, where a causal model predicts all but the first."""
    totals = [sum(sum(each.counts.get(name, ())) for each in of_ranks) for name in (PREDICTED, LABELS)]
    return totals[0] < totals[1] and abs(factor - totals[0] / totals[1]) < max(1e-4, noise)


def _near(one: float, other: float) -> bool:
    return abs(one - other) < 1e-9
