"""Relations of a mini-batch whose gradient a framework's own code can compute again: verl's, OpenRLHF's, SkyRL's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import parameters, ranks, rollouts, window
from .relation import Relation, Verdict, micro_batches, not_checked
from .sketches import sketch

SIZES = "micro-batch size"
RATIO = "old log-probabilities"
MASKED = "masked tokens"
KL = "KL loss"
_RANDOM = 0.05
"""A gradient that differs by more from another random state is random; rounding in bfloat16 is 4e-03."""
FINE = 1e-4
"""Log-probabilities of one model, in nats, differ by less."""
MOVED = 1.0
"""How far a reference is moved from the policy, in nats."""


class MiniBatch:
    """The rows of a mini-batch on this rank, and the micro-batches that the run splits them into."""

    ends = False
    """Whether the run ends afterwards: the engine may then hold a gradient."""

    def __init__(self, rows: int) -> None:
        self._rows, self._cut = rows, 0
        self._ratios: list[torch.Tensor] = []
        self._sampled = rollouts.Sampled()

    @property
    def size(self) -> str:
        """The mini-batch's size as text."""
        number = ranks.number()
        where = f" on each of {number} ranks" if number > 1 else ""
        return f"mini-batch of {self._rows} rows in {micro_batches(self._cut)}{where}"

    def _other_rows(self, group: int = 1) -> int:
        """The rows, or groups of rows, per micro-batch that give another number of micro-batches; 0 without any.

        It is the same on each rank, and every rank must call it.
        """
        of_ranks = ranks.gathered(ranks.Mine(used=torch.tensor([float(self._rows), float(self._cut)])))
        for rows in (1, 2):
            if all(each.used[0] % (rows * group) == 0 for each in of_ranks) and any(
                each.used[0] != each.used[1] * rows * group for each in of_ranks
            ):
                return rows
        return 0

    def _comparing(self, loss: Callable[..., Any], mask_name: str, engine_name: str) -> Callable[..., Any]:
        """Return a policy loss whose first two arguments, log-probabilities, new and old, are compared here.

        Args:
            loss: the framework's.
            mask_name: the loss's argument that has the mask.
            engine_name: the one that has the engine's log-probabilities, or None.
        """

        @functools.wraps(loss.forward if isinstance(loss, torch.nn.Module) else loss)
        def noted(*given: Any, **named: Any) -> Any:
            mask, engine = named.get(mask_name), named.get(engine_name)
            if len(given) > 1 and mask is not None:
                if given[1] is not None:
                    counted = (given[0].detach().double() - given[1].double()).abs()[mask.bool()]
                    if counted.numel():
                        self._ratios.append(counted.max().cpu())
                if engine is not None:
                    self._sampled.add(given[0], engine, mask)
            return loss(*given, **named)

        return noted

    def _noted(self, compute: Callable[[], object]) -> rollouts.Sampled:
        """Return how far log-probabilities of another pass are from the engine's; nothing else is kept of it."""
        before = dict(vars(self))
        self._ratios, self._sampled = [], rollouts.Sampled()
        compute()
        found = self._sampled
        vars(self).update(before)
        return found


def of_sizes(
    mine: Sequence[torch.Tensor],
    rows: int,
    rounded: Callable[[], torch.Tensor],
    *,
    sharded: bool,
    selects: str = "",
    half: bool = False,
) -> tuple[Relation, float]:
    """Compare a mini-batch's gradient in the run's micro-batches with the one in micro-batches of other sizes.

    Args:
        mine: this rank's gradient in the run's micro-batches, the same with another rounding and another random
            state, and the one in other micro-batches; sketches.
        rows: the rows of the other micro-batches.
        rounded: computes this rank's gradient in the run's micro-batches with another rounding in the forward pass.
        sharded: each rank has a part of the gradient, not its own gradient, of which the run takes the mean.
        selects: a loss that treats some tokens of each micro-batch differently, by definition.
        half: whether the weights are in float16, where a loss may be scaled beyond what is finite.

    Returns:
        the relation, and the noise.
    """
    whole, repeated, cut = together(mine, sharded)
    if not bool(whole.isfinite().all()):
        if half:
            return not_checked(SIZES, "the gradient is not finite (float16)"), 0.0
        alone = "" if bool(cut.isfinite().all()) else ", nor is it in micro-batches of another size"
        return Relation(SIZES, Verdict.DEVIATES, "nan", f"the gradient is not finite{alone}"), 0.0
    if not bool(whole.any() or cut.any()):
        return not_checked(SIZES, "the gradient is 0: no token is trained, or none has an advantage"), 0.0
    noise = float((repeated - whole).norm()) / (float(whole.norm()) or 1.0)
    if noise > _RANDOM:
        return not_checked(SIZES, f"the gradient is random (relative difference {noise:.2g}): dropout?"), noise
    law = f"the gradient in micro-batches of {rows} row{'s' * (rows > 1)}"
    result = window.judge(whole, cut[None], {law: [1.0]}, noise)
    if result.law:
        text = f"{law} ({result.deviation:.0e}, noise {noise:.0e})"
        return Relation(SIZES, Verdict.HOLDS, "1.000", text), noise
    measured = f"{result.weights[0]:.3f}"
    if selects:
        return Relation(SIZES, Verdict.NOTE, measured, f"{selects} selects tokens within each micro-batch"), noise
    if result.factor is not None:
        return Relation(SIZES, Verdict.DEVIATES, measured, f"{result.factor:.3f} x {law}"), noise
    text = f"{result.residual:.2g} of the gradient is not {law} (noise {noise:.0e})"
    (moved,) = together([rounded()], sharded)
    of_passes = float((moved - whole).norm()) / (float(whole.norm()) or 1.0)
    if result.deviation <= window.limit(of_passes):
        text += f"; rounding in the forward pass changes {of_passes:.2g} of it, as where a loss clips narrowly"
        return Relation(SIZES, Verdict.NOTE, measured, text), noise
    return Relation(SIZES, Verdict.DEVIATES, measured, text), noise


def compared(name: str, used: torch.Tensor, wanted: torch.Tensor, law: str, noise: float) -> Relation:
    """Compare two gradients over all ranks, of which the second one is known by the law."""
    result = window.judge(used, wanted[None], {law: [1.0]}, noise)
    if result.law:
        return Relation(name, Verdict.HOLDS, "1.000", f"{law} ({result.deviation:.0e})")
    text = f"{result.residual:.2g} of the gradient is not {law}"
    if result.factor is not None:
        text = f"{result.factor:.3f} x {law}"
    return Relation(name, Verdict.DEVIATES, f"{result.weights[0]:.3f}", text)


def together(mine: Sequence[torch.Tensor], sharded: bool) -> list[torch.Tensor]:
    """Return gradients over all ranks, each of which must call it."""
    of_ranks = ranks.gathered(ranks.Mine(own=torch.stack([*mine])))
    own = [each.own for each in of_ranks]
    return [*(torch.cat(own, 1) if sharded else torch.stack(own).mean(0))]


def of_ratios(apart: Iterable[torch.Tensor]) -> Relation | None:
    """Before the first update, the policy's log-probabilities are those that the loss calls old.

    Args:
        apart: the largest difference of a counted token in each micro-batch of this rank.
    """
    largest = over_ranks([float(each) for each in apart])
    if largest is None:
        return None
    measured = f"{largest:.1g}"
    if largest <= FINE:
        return Relation(RATIO, Verdict.HOLDS, measured, "every token's ratio is 1 before the first update")
    text = "largest difference of a token from the engine's own log-probability; causes: rounding in half"
    text += " precision, rollout log-probabilities (bypass mode), or another temperature or mask"
    return Relation(RATIO, Verdict.NOTE, measured, text)


def over_ranks(mine: Sequence[float]) -> float | None:
    """Return the largest number of all ranks; None if no rank has one."""
    of_ranks = ranks.gathered(ranks.Mine(used=torch.tensor([*mine], dtype=torch.float64)))
    return max((float(each.used.max()) for each in of_ranks if len(each.used)), default=None)


def of_masked(used: torch.Tensor, filled: torch.Tensor, noise: float) -> Relation:
    """Zeros in masked tokens must not change the gradient.

    Args:
        used: the mini-batch's gradient over all ranks.
        filled: the same with zeros in place of what masked tokens hold.
        noise: the relative rounding error.
    """
    if not bool(filled.isfinite().all()):
        return not_checked(MASKED, "the gradient is not finite with zeros in masked tokens either")
    if not bool(used.isfinite().all()):
        text = "the gradient is not finite because of what masked tokens hold: it is finite with zeros there"
        return Relation(MASKED, Verdict.DEVIATES, "nan", text)
    apart = float((used - filled).norm()) / (float(filled.norm()) or 1.0)
    holds = apart <= window.limit(noise)
    text = "" if holds else "relative change of the gradient by zeros in place of what masked tokens hold"
    return Relation(MASKED, Verdict.HOLDS if holds else Verdict.DEVIATES, f"{apart:.0e}", text)


def of_divergence(with_it: torch.Tensor, without: torch.Tensor, noise: float) -> Relation:
    """The term of the KL in the loss must have a gradient where the reference differs from the policy.

    Args:
        with_it: the gradient over all ranks with coefficient 1, to a reference that differs, without advantages.
        without: the same with coefficient 0.
        noise: the relative rounding error.
    """
    if not bool(with_it.isfinite().all() and without.isfinite().all()):
        return not_checked(KL, "the gradient is not finite")
    size = float((with_it - without).norm())
    if size > window.limit(noise) * float(with_it.norm()):
        return Relation(KL, Verdict.HOLDS, f"{size:.1g}", "the norm of its gradient, with coefficient 1")
    text = "the KL loss has no gradient: coefficients 0 and 1 give the same one"
    return Relation(KL, Verdict.DEVIATES, "0", text)


def of_trained(named: Mapping[str, torch.nn.Parameter], squares: torch.Tensor) -> Relation:
    """Parameters that require a gradient and got zeros or none, over all ranks.

    Args:
        named: those of the model that require a gradient.
        squares: each one's sum of squares on this rank.
    """
    of_ranks = ranks.gathered(ranks.Mine(used=squares))
    total = torch.stack([each.used for each in of_ranks]).sum(0).tolist()
    zero = [name for name, each in zip(named, total, strict=True) if each == 0]
    counts = f"{len(named)} trained"
    if not zero:
        return Relation(parameters.TRAINED, Verdict.HOLDS, counts)
    text = f"{len(zero)} got a zero gradient or none: {parameters.shown(zero)}"
    return Relation(parameters.TRAINED, Verdict.NOTE, counts, text)


def squares(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Return each gradient's sum of squares."""
    sums = [0.0 if each is None else float(each.double().pow(2).sum()) for each in gradients]
    return torch.tensor(sums, dtype=torch.float64)


def local_gradients(named: Mapping[str, torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """Return this rank's part of each parameter's gradient."""
    return [None if each.grad is None else local(each.grad) for each in named.values()]


def sketched(gradients: Sequence[torch.Tensor | None], named: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    """Return the sketch of this rank's parts of these parameters' gradients."""
    return sketch(gradients, [local(each).numel() for each in named.values()])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_of(owner: type, method: str, package: str) -> bool:
    """Whether a class and its method are a framework's, not a user's."""
    found = inspect.getattr_static(owner, method, None)
    if hasattr(found, "_rehearses"):
        found = found.__wrapped__
    where = getattr(found, "__globals__", {}).get("__name__", "")
    return all(each.partition(".")[0] == package for each in (owner.__module__, where))
