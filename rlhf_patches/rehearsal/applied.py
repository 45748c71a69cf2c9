"""The gradient at the optimizer's step: the window's gradient times one factor, that of the clipping."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import pieces, window
from .parameters import shown
from .ranks import Mine
from .relation import Relation, Verdict

NAME = "gradient at the step"
_BESIDE = 1e-6
"""`torch.nn.utils.clip_grad_norm_` adds this to the norm."""
_SAME = 1e-4
_TIMES_UNIT = 4
_FUSED = ("grad_scale", "found_inf")
"""What the scaler gives to fused optimizers, which divide and skip themselves."""
_RELEASED = ("transformers.", "trl.", "accelerate.", "torch.", "rlhf_patches.")
_BETWEEN = ("_clip_grad_norm", "_get_grad_norm", "_inner_training_loop", "_run_epoch")
"""The trainer's methods that may change a gradient after ``training_step``."""


class Norm:
    """The norm of a gradient that is read one parameter at a time."""

    def __init__(self) -> None:
        self._square = 0.0

    def noted(self, gradients: Iterable[torch.Tensor | None]) -> Iterator[torch.Tensor | None]:
        """Yield the gradients unchanged."""
        for gradient in gradients:
            if gradient is not None:
                self._square += float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)) ** 2
            yield gradient

    def value(self) -> float:
        return math.sqrt(self._square)


@dataclass(frozen=True)
class Made:
    """The window's gradient before it is clipped.

    Args:
        sketch: of all parameters.
        norm: the whole gradient's, not the sketch's.
        sizes: the number of the sketch's entries of each parameter.
        names: of the parameters.
    """

    sketch: torch.Tensor
    norm: float
    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def cleared(self, now: torch.Tensor) -> list[str]:
        """Return the parameters whose gradient is zero now and was not."""
        parts = zip(self.names, self.sketch.split(self.sizes), now.split(self.sizes), strict=True)
        return [name for name, before, after in parts if bool(before.any()) and not bool(after.any())]


class Held:
    """Calls a function before the next step of an optimizer, and another one if a float16 scaler skips the step.

    Args:
        optimizer: the trainer's optimizer.
        scaler: the accelerator's gradient scaler; may be None.
        at_step: called with the factor by which the gradients are still scaled.
        skipped: called after a step that did not happen.
    """

    def __init__(
        self, optimizer: Any, scaler: Any, at_step: Callable[[float], None], skipped: Callable[[], None]
    ) -> None:
        self._outer, self._inner = optimizer, innermost(optimizer)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._at_step, self._skipped = at_step, skipped
        self._hook = self._inner.register_step_pre_hook(self._reached)
        if self._scaler is not None:
            step = self._outer.step

            @functools.wraps(step)
            def stepping(*given: Any, **named: Any) -> Any:
                made = step(*given, **named)
                if self._hook is not None:
                    self.off()
                    self._skipped()
                return made

            vars(self._outer)["step"] = stepping

    def off(self) -> None:
        """Remove what this object has put in place."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            if self._scaler is not None:
                vars(self._outer).pop("step", None)

    def ended(self) -> None:
        """Let the scaler begin anew: the step that it prepared does not happen."""
        if self._scaler is not None:
            self._scaler._per_optimizer_states.pop(id(self._inner), None)
            for name in _FUSED:
                vars(self._inner).pop(name, None)

    def _reached(self, *_: Any) -> None:
        self.off()
        scale, infinite = (getattr(self._inner, name, None) for name in _FUSED)
        if infinite is not None and bool(infinite):
            self._skipped()
        else:
            self._at_step(float(scale) if scale is not None else 1.0)


def innermost(optimizer: Any) -> Any:
    """Return torch's optimizer in accelerate's."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def cannot(optimizer: Any, scaler: Any) -> str:
    """Return why the optimizer's step cannot be reached; empty if it can."""
    inner = innermost(optimizer)
    if not isinstance(inner, torch.optim.Optimizer) or not hasattr(inner, "_optimizer_step_pre_hooks"):
        return f"{type(inner).__name__} is not a torch.optim.Optimizer"
    if not hasattr(type(inner).step, "hooked"):
        return f"{type(inner).__name__}.step calls no hooks"
    if scaler is not None and scaler.is_enabled() and inner is optimizer:
        return "the float16 scaler is not accelerate's"
    return ""


def changed_by(trainer: Any) -> str:
    """Return the user's code that may change the gradient before the step on purpose; empty if there is none."""

    def own(function: Any) -> bool:
        return not pieces.written_in(getattr(function, "__func__", function)).startswith(_RELEASED)

    for each in trainer.callback_handler.callbacks:
        if own(type(each).on_pre_optimizer_step):
            return f"{type(each).__name__}.on_pre_optimizer_step"
    for name in _BETWEEN:
        if hasattr(trainer, name) and own(getattr(trainer, name)):
            return f"{type(trainer).__name__}.{name}"
    if own(trainer.accelerator.clip_grad_norm_):
        return "clip_grad_norm_"
    hooks = innermost(trainer.optimizer)._optimizer_step_pre_hooks.values()
    return "a hook of the optimizer" if any(map(own, hooks)) else ""


def clipped(norm: float, most: float | None) -> float:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`; 1 without a limit."""
    return min(1.0, most / (norm + _BESIDE)) if most else 1.0


def judge(made: Made, of_ranks: list[Mine], most: float | None, unit: float, by: str) -> Relation:
    """Compare the gradient at the step with the window's.

    Args:
        made: the window's gradient on this rank.
        of_ranks: with the gradient at the step as ``used``, and the window's as ``own``.
        most: ``max_grad_norm``.
        unit: the machine epsilon of the gradients' dtype, if it is coarser than float32; else 0.
        by: `changed_by` on any rank.
    """
    now, size = of_ranks[0].used, float(made.sketch.norm())
    off = max(window.FLOOR, _TIMES_UNIT * unit)
    factor, expected = float(now @ made.sketch) / (size**2 or 1.0), clipped(made.norm, most)
    measured = f"{factor:.3f} x"
    clipping = f"norm {made.norm:.3g}, max_grad_norm {most:g}" if most else "no clipping"
    apart = [float((each.used - now).norm()) / (size or 1.0) for each in of_ranks]
    before = [float((each.own - of_ranks[0].own).norm()) / (size or 1.0) for each in of_ranks]
    for rank, (after, earlier) in enumerate(zip(apart, before, strict=True)):
        if after > off >= earlier:
            text = f"rank {rank} steps with another gradient than rank 0, and both had the same ({after:.2g})"
            return Relation(NAME, Verdict.DEVIATES, measured, text)
    gone = made.cleared(now)
    if gone and not bool(now.any()):
        return Relation(NAME, Verdict.DEVIATES, measured, "the whole gradient was cleared before the step")
    text = ""
    if not bool(now.isfinite().all()):
        text = "the gradient at the step is not finite, and the window's is"
    elif gone:
        text = f"{len(gone)} have no gradient at the step: {shown(gone)}"
    elif float((now - factor * made.sketch).norm()) > off * (float(now.norm()) or 1.0):
        left = float((now - factor * made.sketch).norm()) / (float(now.norm()) or 1.0)
        text = f"{left:.2g} of the gradient at the step is not the window's"
    elif abs(factor - expected) > max(_SAME, _TIMES_UNIT * unit) * expected:
        text = f"expected {expected:.3f} x ({clipping})"
    if not text:
        return Relation(NAME, Verdict.HOLDS, measured, clipping)
    if by:
        return Relation(NAME, Verdict.NOTE, measured, f"{text}; {by} may do that on purpose")
    return Relation(NAME, Verdict.DEVIATES, measured, text)
