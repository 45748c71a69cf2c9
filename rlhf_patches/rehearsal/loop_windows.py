"""Records the windows of a training loop, from one optimizer step to the next, and judges their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..definitions.words import plural
from . import window
from .loop_gradients import Follower, sketch_of
from .parameters import shown
from .relation import Relation, Verdict, not_checked

GRADIENT = "gradient used"
_TIMES_EPSILON = 10.0
_SAME = 1e-6


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient in one window, as sketches.

    Args:
        name: the parameter's name.
        made: the sum of what this rank's backward passes made since the last step, or since a clearing.
        size: the sum of the sizes of these contributions.
        passes: their number.
        dropped: the number of contributions that were cleared before the step.
        began: the gradient that the window began with; None if it was cleared.
        before: the gradient that the step before this window used; None if there was none.
        after: the gradient after the last backward pass.
        used: the gradient that the step used; None if there was none.
        epsilon: the machine epsilon of the gradient's dtype.
        finite: whether all contributions were finite.
        reduced: whether DistributedDataParallel averages it over all ranks.
    """

    name: str
    made: torch.Tensor
    size: float
    passes: int
    dropped: int
    began: torch.Tensor | None
    before: torch.Tensor | None
    after: torch.Tensor | None
    used: torch.Tensor | None
    epsilon: float
    finite: bool = True
    reduced: bool = False


@dataclass
class Window:
    """What one optimizer's step used.

    Args:
        gradients: those that a backward pass made.
        others: the names of parameters with a gradient that no backward pass made.
        without: the number of parameters without a gradient.
        divisor: the number by which the last loss was divided.
    """

    gradients: list[Gradient] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    without: int = 0
    divisor: float = 1.0

    @property
    def passes(self) -> int:
        """The number of backward passes that the step uses."""
        return max((each.passes for each in self.gradients), default=0)


def read(optimizer: Any, follower: Follower, names: dict[int, str], reduced: set[int]) -> Window:
    """Record the window that ends with an optimizer's step.

    Args:
        optimizer: a ``torch.optim.Optimizer`` before its step.
        follower: what followed the backward passes.
        names: the parameters' names by identity.
        reduced: the identities of those that DistributedDataParallel averages.
    """
    made = Window(divisor=follower.divisor)
    for place, parameter in enumerate(parameters_of(optimizer)):
        name = names.get(id(parameter), f"parameter {place}")
        followed, gradient = follower.of(parameter), parameter.grad
        known = followed is not None and (followed.made is not None or followed.used is not None)
        if not known and id(parameter) not in reduced:
            if gradient is None:
                made.without += 1
            else:
                made.others.append(name)
            continue
        if followed is None:
            followed = follower.adopt(parameter)
        if followed.made is None:  # not reached in this window
            if gradient is None and id(parameter) not in reduced:
                made.without += 1
                continue
            followed.rests()
        before, followed.used = followed.used, None if gradient is None else sketch_of(gradient)
        kind = parameter.dtype if gradient is None else gradient.dtype
        epsilon = torch.finfo(kind).eps
        counted = followed.made, followed.size, followed.passes, followed.dropped
        states = followed.began, before, followed.after, followed.used
        made.gradients.append(Gradient(name, *counted, *states, epsilon, followed.finite, id(parameter) in reduced))
    return made


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return an optimizer's parameters in their order."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def expected(of_ranks: Sequence[Window], rank: int) -> Window:
    """Return a rank's window with the mean over ranks as what was made of the gradients that are averaged."""
    first = of_ranks[rank]
    if len(of_ranks) == 1:
        return first
    together = []
    for place, each in enumerate(first.gradients):
        if not each.reduced:
            together.append(each)
            continue
        all_of_it = [window.gradients[place] for window in of_ranks]
        made = torch.stack([one.made for one in all_of_it]).mean(0)
        size = sum(one.size for one in all_of_it) / len(all_of_it)
        together.append(replace(each, made=made, size=size, finite=all(one.finite for one in all_of_it)))
    return replace(first, gradients=together)


def judge(windows: Sequence[Window], why_not: str) -> Relation:
    """The gradient that a step uses must be the sum of what the backward passes since the last step made.

    Args:
        windows: one optimizer's first windows, with the mean over ranks where it is due.
        why_not: why gradients could not be followed; empty if they could.
    """
    if why_not:
        return not_checked(GRADIENT, why_not)
    if others := next((each.others for each in windows if each.others), None):
        text = f"no backward pass made the gradient of {len(others)}: {shown(others)} (copies, shards, or your own)"
        return not_checked(GRADIENT, text)
    if not any(each.gradients for each in windows):
        text = "no parameter of the optimizer got a gradient"
        return Relation(GRADIENT, Verdict.DEVIATES, "0", text)
    if not all(one.finite for each in windows for one in each.gradients):
        return not_checked(GRADIENT, "a backward pass made an infinite gradient or NaN")
    worst, wrong, notes = 0.0, "", []
    for place, each in enumerate(windows):
        apart, problem = _sums(each, place)
        worst, wrong = max(worst, apart), wrong or problem
        problem, note = _steps(each)
        wrong = wrong or problem
        if note and note not in notes:
            notes.append(note)
    counts = f"{plural(len(windows), 'window', 'windows')} of {', '.join(str(each.passes) for each in windows)}"
    if wrong:
        return Relation(GRADIENT, Verdict.DEVIATES, counts, wrong)
    notes = [f"backward passes ({worst:.0e})", *notes]
    return Relation(GRADIENT, Verdict.HOLDS, counts, "; ".join(notes))


def _sums(one: Window, place: int) -> tuple[float, str]:
    """Return the largest relative difference between made and accumulated, and what is wrong; empty if nothing is."""
    worst = 0.0
    stale: list[tuple[str, bool]] = []
    other: list[str] = []
    local: list[str] = []
    for each in one.gradients:
        after = torch.zeros_like(each.made) if each.after is None else each.after
        size = each.size or 1.0
        apart = float((after - each.made).norm()) / size
        limit = max(window.FLOOR, _TIMES_EPSILON * each.epsilon)
        if apart <= limit:
            worst = max(worst, apart)
        elif each.began is not None and float((after - each.made - each.began).norm()) <= limit * (
            size + float(each.began.norm())
        ):
            kept = each.before is not None and float((each.before - each.began).norm()) <= _SAME * float(
                each.before.norm()
            )
            stale.append((each.name, kept))
        else:
            (local if each.reduced else other).append(each.name)
    number = len(one.gradients)
    if uncleared := [name for name, as_it_was in stale if as_it_was]:
        text = f"window {place + 1} begins with the gradient of the step before: {len(uncleared)} of {number}"
        return worst, f"{text} parameters were not cleared: {shown(uncleared)}"
    if local:
        text = f"{len(local)} of {number} are not the mean over ranks of what was made: {shown(local)}"
        return worst, f"{text} (DistributedDataParallel did not reduce them)"
    if other:
        return worst, f"{len(other)} of {number} are not the sum of what was made: {shown(other)}"
    return worst, ""


def _steps(one: Window) -> tuple[str, str]:
    """Return what is wrong between the last backward pass and the step, and a note, such as a clipping."""
    pairs = [
        (each.after, torch.zeros_like(each.after) if each.used is None else each.used)
        for each in one.gradients
        if each.after is not None
    ]
    if not pairs:
        return "", ""
    after, used = (torch.cat(each) for each in zip(*pairs, strict=True))
    if not float(after.norm()):
        return "", "the gradient is 0"
    if not float(used.norm()):
        return "the gradient was cleared between the last backward pass and the step", ""
    times = float(after @ used) / float(after @ after)
    if float((used - times * after).norm()) > 1e-3 * float(used.norm()):
        return "", "before the step your code changes gradients, and not by one factor"
    if abs(times - 1) > 1e-4:
        return "", f"the step uses {times:.3g} x the gradient (clipping, a loss scale, or your own factor)"
    return "", ""


def cleared(windows: Sequence[Window]) -> tuple[str, bool]:
    """Return what is noticed if the second window used only its last backward passes, and whether it is an error.

    It is one if the loss is divided by the number of all of the window's backward passes. Else a gradient may have been
    made for another purpose.

    Args:
        windows: the windows of the only optimizer.
    """
    if len(windows) < 2 or not windows[1].gradients:
        return "", False
    second = windows[1]
    dropped = min(each.dropped for each in second.gradients)
    if not dropped or _steps(second)[1].startswith("before the step your code changes"):
        return "", False
    total = dropped + second.passes
    text = f"{dropped} of {total} backward passes were cleared before the step, with unchanged parameters"
    return text, abs(second.divisor - total) < _SAME
