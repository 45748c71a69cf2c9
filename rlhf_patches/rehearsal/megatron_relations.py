"""The relations of a window and a step of megatron-core, from what all ranks measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import parameters, window
from .megatron_parameters import Held, Mine, Part, parts
from .parameters import shown
from .relation import Relation, Verdict, micro_batches, not_checked
from .weights import RANKS

COPIES = "copies of a micro-batch"
MEAN = "mean over ranks"
REPLICAS = "copies of parameters"
NORM = "gradient norm"
AFTER = "parameters after the step"
MOVED = "optimizer step"
_NORM_ROUNDING = 1e-4
_SMALL = 1e-3
"""A gradient that is smaller than this part of the whole may be rounding errors that cancel."""
_VISIBLE = 1e-6


def copies(whole: torch.Tensor, alone: torch.Tensor, number: int, noise: float) -> Relation:
    """A window of copies of the first micro-batch has the gradient of that micro-batch."""
    law = "the micro-batch's own gradient"
    result = window.judge(whole, alone[None], {law: [1.0]}, noise)
    measured = f"{result.weights[0]:.3f}"
    if result.law:
        text = f"{micro_batches(number)} ({result.deviation:.0e}, noise {noise:.0e})"
        return Relation(COPIES, Verdict.HOLDS, measured, text)
    if result.factor is not None:
        return Relation(COPIES, Verdict.DEVIATES, measured, f"{result.factor:.3f} x {law}")
    text = f"{result.residual:.2g} of the gradient is not {law} (noise {noise:.0e})"
    return Relation(COPIES, Verdict.DEVIATES, measured, text)


class Copies:
    """Which parameters are copies on several ranks, and whether these are equal.

    Args:
        of_ranks: what the ranks measured.
        noise: the relative rounding error of a repeated gradient.
    """

    def __init__(self, of_ranks: list[Mine], noise: float) -> None:
        self._limit = window.limit(noise)
        self._sharded = of_ranks[0].sharded
        self._parameters = parts(of_ranks)
        self._whole = math.sqrt(sum(part.squares for over in self._parameters for part in over))
        self.counted_twice: list[str] = []
        self.unmarked: list[str] = []
        self._apart: list[str] = []
        self._squares = 0.0
        for over in self._parameters:
            self._take(over)
        self._ties = self._tied()

    def _take(self, over: list[Part]) -> None:
        """Add one parameter's squares, each element once."""
        first = over[0]
        if first.first.shared:
            return
        total = sum(part.squares for part in over)
        if len(over) == 1 or not total:
            self._squares += total
            if total and not any(each.counted for part in over for each in part.copies):
                self.unmarked.append(first.name)
            return
        same = all(self._near(first.gradient, part.gradient) for part in over)
        same_values = all(torch.equal(first.first.before, part.first.before) for part in over)
        if same and same_values:
            self._squares += total / len(over)
            if first.first.marked:
                self.counted_twice.append(first.name)
        elif first.first.marked or not same_values:
            self._squares += total
            if not first.first.marked:
                self.unmarked.append(first.name)
        else:
            self._squares += first.squares
            self._apart.append(first.name)

    def _near(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return float((one - other).norm()) <= self._limit * max(float(one.norm()), _SMALL * self._whole)

    def _tied(self) -> list[list[Part]]:
        """The embeddings that first and last stage hold, by tensor-parallel rank."""
        tied = [over for over in self._parameters if over[0].first.tied]
        return [[over[rank] for over in tied] for rank in range(min(map(len, tied), default=0))] if tied else []

    def mean(self, tokens: float | None, noise: float) -> Relation | None:
        """The gradient is the mean of data-parallel ranks' own, or their sum divided by all tokens.

        Args:
            tokens: the number that the loss functions returned on all ranks; None without a loss per token.
            noise: the relative rounding error of a repeated gradient.
        """
        chosen = [
            part
            for over in self._parameters
            for part in over
            if not (part.first.expert or part.first.tied or part.first.shared)
            and (len(over) == 1 or (part.first.marked and not part.first.summed))
        ]
        number = len(chosen[0].copies) if chosen else 1
        if number == 1:
            return None
        if not len(chosen[0].first.local):
            return not_checked(MEAN, "gradients are reduced while they are computed (overlap_grad_reduce)")
        if tokens == 0:
            return not_checked(MEAN, "the loss function returns no number of tokens")
        whole = torch.cat([part.gradient for part in chosen])
        local = torch.cat([torch.stack([each.local for each in part.copies]).sum(0) for part in chosen])
        law = f"the mean over {number} ranks" if tokens is None else f"the mean over {tokens:.0f} tokens of all ranks"
        result = window.judge(whole, local[None], {law: [1 / (tokens or number)]}, noise)
        if result.factor is None:
            text = f"{result.residual:.2g} of the gradient is not {law} (noise {noise:.0e})"
            return Relation(MEAN, Verdict.DEVIATES, "", text)
        measured = f"{result.factor:.3f}"
        if result.law:
            return Relation(MEAN, Verdict.HOLDS, measured, f"{law} ({result.deviation:.0e}, noise {noise:.0e})")
        return Relation(MEAN, Verdict.DEVIATES, measured, f"{result.factor:.3f} x {law}")

    def across_ranks(self) -> Relation:
        """Data-parallel ranks hold the same gradient."""
        if self._sharded:
            return not_checked(RANKS, "each data-parallel rank holds its part (distributed optimizer)")
        apart, worst = [], 0.0
        for over in self._parameters:
            for part in over:
                for each in part.copies[1:]:
                    if not self._near(part.gradient, each.gradient):
                        apart.append(part.name)
                        worst = max(worst, float((part.gradient - each.gradient).norm()) / (self._whole or 1.0))
        if not apart:
            return Relation(RANKS, Verdict.HOLDS, "0")
        text = f"data-parallel ranks hold different gradients: {shown(dict.fromkeys(apart))}"
        return Relation(RANKS, Verdict.DEVIATES, f"{worst:.2g}", text)

    def relation(self) -> Relation | None:
        """What tensor-parallel ranks, and first and last stage, hold copies of has one gradient."""
        number = sum(len(over) > 1 and not over[0].first.marked for over in self._parameters) + bool(self._ties)
        if not number:
            return None
        apart = list(self._apart)
        for over in self._ties:
            if any(not self._near(over[0].gradient, part.gradient) for part in over[1:]):
                apart += [part.name for part in over]
        measured = f"{number} on several ranks"
        if apart:
            text = f"{len(apart)} have different gradients on ranks that hold copies: {shown(apart)}"
            return Relation(REPLICAS, Verdict.DEVIATES, measured, text)
        if self.unmarked:
            text = f"{len(self.unmarked)} differ on tensor-parallel ranks, without the mark of a part: "
            return Relation(REPLICAS, Verdict.NOTE, measured, text + shown(self.unmarked))
        return Relation(REPLICAS, Verdict.HOLDS, measured, "one gradient")

    def norm(self, found: float | None, why: str) -> Relation:
        """The norm that clips is the norm of the gradient, each element once."""
        right = math.sqrt(self._squares)
        if found is None:
            return not_checked(NORM, why)
        ratio = found / right if right else 1.0
        measured = f"{ratio:.3f} x"
        if abs(ratio - 1) <= _NORM_ROUNDING:
            return Relation(NORM, Verdict.HOLDS, measured, f"the norm of the gradient, {right:.3g}")
        text = f"{found:.4g}, and the norm of the gradient is {right:.4g}"
        if self.counted_twice:
            text += f"; counted on each tensor-parallel rank, which hold copies: {shown(self.counted_twice)}"
        if self.unmarked:
            text += f"; counted on the first tensor-parallel rank only: {shown(self.unmarked)}"
        return Relation(NORM, Verdict.DEVIATES, measured, text)

    def after(self) -> Relation:
        """Copies are equal after the step."""
        wrong: list[str] = []
        rounded: list[str] = []
        for copies_of, gradients_equal in self._all_copies():
            first = copies_of[0]
            if all(torch.equal(each.after, first.after) for each in copies_of):
                continue
            began = all(torch.equal(each.before, first.before) for each in copies_of)
            (rounded if began and not gradients_equal else wrong).append(first.name)
        number = len(self._parameters)
        if wrong:
            text = f"copies of {len(wrong)} differ: {shown(dict.fromkeys(wrong))}"
            return Relation(AFTER, Verdict.DEVIATES, f"{number}", text)
        if rounded:
            text = f"copies of {len(rounded)} differ as their gradients do: {shown(dict.fromkeys(rounded))}"
            return Relation(AFTER, Verdict.NOTE, f"{number}", text)
        return Relation(AFTER, Verdict.HOLDS, f"{number}", "copies are equal")

    def _all_copies(self) -> list[tuple[list[Held], bool]]:
        """Copies, and whether their gradients are equal bit for bit; those whose gradients differ are left out."""
        found = []
        for over in self._parameters:
            found += [(part.copies, self._sharded or _equal(part.copies)) for part in over]
            if len(over) > 1 and not over[0].first.marked and over[0].name not in (*self._apart, *self.unmarked):
                equal = all(torch.equal(over[0].gradient, part.gradient) for part in over)
                found.append(([part.first for part in over], equal))
        for over in self._ties:
            equal = all(torch.equal(over[0].gradient, part.gradient) for part in over)
            found.append(([part.first for part in over], equal))
        return found

    def optimizer(self, strangers: int) -> Relation:
        """The optimizer holds what requires a gradient."""
        missing = [
            part.name for over in self._parameters for part in over if not any(each.optimized for each in part.copies)
        ]
        if not self._sharded:
            missing += [
                part.name
                for over in self._parameters
                for part in over
                if part.name not in missing and not all(each.optimized for each in part.copies)
            ]
        number = sum(map(len, self._parameters))
        problems = []
        if missing:
            problems.append(f"the optimizer lacks {len(missing)} that require a gradient: {shown(missing)}")
        if strangers:
            problems.append(f"the optimizer has {strangers} that the model lacks")
        verdict = Verdict.DEVIATES if problems else Verdict.HOLDS
        return Relation(parameters.OPTIMIZER, verdict, f"{number - len(missing)} of {number}", "; ".join(problems))

    def trained(self) -> Relation:
        """Parameters without a gradient."""
        every = [part for over in self._parameters for part in over]
        zero = [part.name for part in every if not part.nonzero]
        counts = f"{len(every)} trained"
        if not zero:
            return Relation(parameters.TRAINED, Verdict.HOLDS, counts)
        text = f"{len(zero)} got a zero gradient or none: {shown(zero)}"
        return Relation(parameters.TRAINED, Verdict.NOTE, counts, text)

    def moved(self, rate: float) -> Relation:
        """What has a gradient moves at the step.

        Args:
            rate: the least learning rate, times the factor of clipping.
        """
        with_gradient = [part for over in self._parameters for part in over if part.nonzero]
        still = [part for part in with_gradient if torch.equal(part.first.before, part.first.after)]
        measured = f"{len(with_gradient) - len(still)} of {len(with_gradient)} moved"
        if not still:
            return Relation(MOVED, Verdict.HOLDS, measured)
        if not rate:
            return Relation(MOVED, Verdict.NOTE, measured, "a learning rate is 0 at the first step")
        names = shown([part.name for part in still])
        if any(_should_move(part, rate) for part in still):
            return Relation(MOVED, Verdict.DEVIATES, measured, f"have a gradient and did not move: {names}")
        return Relation(MOVED, Verdict.NOTE, measured, f"the step is too small for the format of {names}")


def _equal(held: Sequence[Held]) -> bool:
    return all(torch.equal(each.gradient, held[0].gradient) for each in held)


def _should_move(part: Part, rate: float) -> bool:
    """Whether a step of a gradient's size, or of the rate's, shows in the format of the values."""
    root = math.sqrt(part.first.size)
    step = rate * min(1.0, math.sqrt(part.squares) / root)
    return not part.first.coarse and step > _VISIBLE * max(float(part.first.before.norm()) / root, 1.0)
