"""Relations of rollouts in a mini-batch of verl, OpenRLHF or SkyRL: the engine's log-probabilities, and equal samples.

Their figures are those of the watches of rollouts, which see later steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from . import ranks
from .relation import Relation, Verdict

ENGINE = "engine's log-probabilities"
SAMPLES = "samples of a prompt"
LARGEST = 0.1
"""Nats per token. Another policy than the trained one differs by more."""
FLOOR = 0.03
"""Kernels that round differently may differ by less."""
TIMES = 3.0
LEAST_CHANCE = 30.0
"""The negative logarithm of a chance that is too small, in nats."""
_OF_TOKENS = 0.01
Row = tuple[Sequence[int], Sequence[int], float]
"""A prompt, its answer without what others wrote, and the answer's log-probability."""


class Sampled:
    """How far the trainer's and the engine's log-probabilities of the sampled tokens are apart, on this rank."""

    def __init__(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)

    def add(self, trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> None:
        """Add a micro-batch's; tokens that are outside of a truncated distribution do not count."""
        if not trainer.shape == engine.shape == mask.shape:
            return
        apart = (trainer.detach().double() - engine.to(trainer.device).double())[mask.bool()]
        apart = apart[~apart.isinf()]
        sums = [apart.abs().sum(), (apart > FLOOR).sum(), torch.tensor(float(apart.numel()))]
        self._sums += torch.stack([each.double().cpu() for each in sums])

    def whole(self) -> tuple[float, float] | None:
        """Return the mean over all ranks, each of which must call it, and the share of tokens that the trainer prefers.

        None without a token.
        """
        of_ranks = ranks.gathered(ranks.Mine(used=self._sums))
        total, above, count = torch.stack([each.used for each in of_ranks]).sum(0).tolist()
        return (total / count, above / count) if count else None


def of_engine(sampled: Sampled, temperature: object, at_one: Callable[[], Sampled]) -> Relation | None:
    """Before the first update, the engine's log-probabilities of sampled tokens are the trainer's but for rounding.

    Args:
        sampled: the trainer's as in the run.
        temperature: the trainer's, the same on each rank.
        at_one: the trainer's at temperature 1.
    """
    if (found := sampled.whole()) is None:
        return None
    mean, above = found
    measured = f"{mean:.2g}"
    if math.isnan(mean):
        return Relation(ENGINE, Verdict.DEVIATES, measured, "of a token that is trained")
    if mean > FLOOR and temperature != 1 and (other := at_one().whole()) and other[0] * TIMES < mean:
        text = f"nats per token: the engine's are of temperature 1 (difference {other[0]:.1g}), not of {temperature}"
        return Relation(ENGINE, Verdict.DEVIATES, measured, text)
    if mean <= LARGEST:
        return Relation(ENGINE, Verdict.HOLDS, measured, "nats per token from the trainer's; rounding gives up to 0.03")
    if above < _OF_TOKENS:
        text = "nats per token; only the engine's are larger, as with top-p or top-k"
        return Relation(ENGINE, Verdict.NOTE, measured, text)
    text = "nats per token from the trainer's: the engine samples from another policy than the one that is trained"
    return Relation(ENGINE, Verdict.DEVIATES, measured, text)


def of_samples(rows: Iterable[Row]) -> Relation | None:
    """The samples of a prompt are not all equal, unless this is likely.

    Each further sample equals the first one with the first one's own probability p, so a group adds log p in nats.
    The chance of a sum s over n groups is below 2^n e^-s, because a group's mean of 1/p if it is equal, and of 1 if it
    is not, is below 2.

    Args:
        rows: of this rank; every rank must call it.
    """
    of_prompts: dict[tuple[int, ...], list[Row]] = {}
    for row in rows:
        if row[1]:
            of_prompts.setdefault(tuple(row[0]), []).append(row)
    groups = [each for each in of_prompts.values() if len(each) > 1]
    equal = [each for each in groups if all(list(other[1]) == list(each[0][1]) for other in each[1:])]
    surprise = -sum((len(each) - 1) * each[0][2] for each in equal)
    mine = torch.tensor([len(groups), len(equal), surprise], dtype=torch.float64)
    number, same, total = torch.stack([each.used for each in ranks.gathered(ranks.Mine(used=mine))]).sum(0).tolist()
    if not number:
        return None
    measured, chance = f"{int(same)} of {int(number)} prompts", total - number * math.log(2)
    if chance <= LEAST_CHANCE:
        return Relation(SAMPLES, Verdict.HOLDS, measured, "have equal samples, which is likely" if same else "")
    text = f"have equal samples, token by token; the chance of this is below e^-{chance:.0f}"
    return Relation(SAMPLES, Verdict.DEVIATES, measured, text)
