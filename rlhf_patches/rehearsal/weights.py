"""The weights of a window's micro-batches, over all ranks, and what they say of the run."""

from __future__ import annotations

import torch

from . import ranks, window
from .relation import Relation, Verdict, micro_batches

RANKS = "gradient across ranks"


def judged(
    name: str,
    of_ranks: list[ranks.Mine],
    used: torch.Tensor,
    noise: float,
    laws: dict[str, list[float]] | None = None,
) -> Relation:
    """Compare a window's gradient with the gradients of its micro-batches.

    Args:
        name: the relation's name.
        of_ranks: the micro-batches' own gradients.
        used: the window's gradient, a float64 vector.
        noise: the relative rounding error of a repeated gradient.
        laws: correct weights by name; by default those of a window.
    """
    own = torch.cat([each.own for each in of_ranks])
    laws = laws or ranks.laws(of_ranks)
    parts = [each.evenly for each in of_ranks if each.evenly is not None]
    evenly = torch.cat(parts) if len(parts) == len(of_ranks) else None
    result = window.judge(used, own, laws, noise, evenly)
    weights = "[" + " ".join(f"{round(each, 3) + 0.0:.3f}" for each in result.weights[:8]) + "]"
    if result.law:
        return Relation(name, Verdict.HOLDS, weights, f"{result.law} ({result.deviation:.0e}, noise {noise:.0e})")
    if result.factor is not None:
        text = f"{result.factor:.3f} x {result.nearest}"
        if result.factor < 1 and ranks.counts_what_nothing_predicts(of_ranks, result.factor, noise):
            text += ": the count includes each row's first label, which is not predicted"
        return Relation(name, Verdict.DEVIATES, weights, text)
    if result.of_the_even is not None:
        text = f"the router's loss has weight {result.of_the_even:.3f}; the rest is {result.nearest}"
        return Relation(name, Verdict.DEVIATES, weights, text)
    if result.residual > window.limit(noise):
        text = f"{result.residual:.2g} of the gradient comes from no micro-batch's loss (noise {noise:.0e})"
        return Relation(name, Verdict.DEVIATES, weights, text)
    text = f"unexpected weights; their sum is {sum(result.weights):.3f}"
    nothing = sum(1 for each in result.weights if abs(each) < 1e-3 * max(map(abs, result.weights)))
    if nothing:
        text += f", and {nothing} of {micro_batches(len(result.weights))} have weight 0"
    return Relation(name, Verdict.DEVIATES, weights, text)


def agree(of_ranks: list[ranks.Mine]) -> Relation:
    """Data-parallel ranks hold the same gradient."""
    size = float(of_ranks[0].used.norm()) or 1.0
    apart = max(float((each.used - of_ranks[0].used).norm()) / size for each in of_ranks)
    if apart == 0:
        return Relation(RANKS, Verdict.HOLDS, "0")
    return Relation(RANKS, Verdict.DEVIATES, f"{apart:.2g}", "data-parallel ranks must hold the same gradient")
