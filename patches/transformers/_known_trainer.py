"""Whether the code of a trainer and of its model's loss is known by identity: decided at a window's first micro-batch.

It is decided again as soon as a function that makes the loss has been replaced, so a micro-batch only compares these.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from operator import is_
from types import MethodType
from typing import Any

import torch
from packaging.version import Version

from . import _known_loss

# TRL's trainers whose own compute_loss is a mean over the micro-batch and ignores num_items_in_batch, by release.
_MEANS = {
    "CPOTrainer": ("0.12.0", "0.13.0"),
    "DPOTrainer": ("0.12.0", "0.13.0"),
    "GKDTrainer": ("0.12.0", "1.6.0"),
    "ORPOTrainer": ("0.12.0", "0.19.1"),
}

_AROUND_THE_LOSS = (
    *("training_step", "compute_loss_context_manager"),
    *("_inner_training_loop", "_run_epoch", "_clip_grad_norm", "_get_grad_norm"),
)
"""A trainer's methods that run between a micro-batch's loss and the optimizer's step, in one release or another."""

# known here: releases and classes whose code was read; code of another package is left as released.


class Window:
    """What is known of the code of a window's losses.

    Attributes:
        reason: why the loss is left as released; empty if all code is known.
        maker: see `maker`.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, reason: str, *, for_good: bool = False) -> None:
        inner = _known_loss.unwrapped(model)
        self._objects: list[Callable[[], Any]] = [*map(weakref.ref, (trainer, model, trainer.state, inner))]
        self._step = -1 if for_good else trainer.state.global_step
        self.reason, self.maker = reason, maker(trainer)
        # Nothing is compared for what is left as released.
        self._marks = None if reason else _marks(_in_use(trainer, model, inner))
        self._around = None if reason else _marks(_around(trainer))

    def holds(self, trainer: Any, model: torch.nn.Module) -> bool:
        """Whether this is still the trainer's window, and what makes its loss has not been replaced since."""
        of, own, state, inner = (each() for each in self._objects)
        if of is not trainer or own is not model or inner is None or state is not trainer.state:
            return False  # each training has its own state, which starts at step 0 again
        if self._step not in (-1, state.global_step):
            return False
        return self._marks is None or _are(self._marks, _in_use(trainer, model, inner))

    def is_around(self, trainer: Any) -> bool:
        """Whether the trainer's other code was known here, and has not been replaced since."""
        return self._around is not None and self._objects[0]() is trainer and _are(self._around, _around(trainer))


_last: Window | None = None


def window(trainer: Any, model: torch.nn.Module, reason: str | None = None) -> Window:
    """The record of this window.

    If ``reason`` is given, which means that a loss could not be read, this trainer's losses are left for the rest of
    its training: no window mixes both.
    """
    global _last
    last = _last
    if reason is None:
        if last is not None and last.holds(trainer, model):
            return last
        around = last is not None and last.is_around(trainer)
        _last = Window(trainer, model, _unknown(trainer, around) or _known_loss.unknown(model))
    else:
        _last = Window(trainer, model, reason, for_good=True)
    return _last


def _in_use(trainer: Any, model: Any, inner: Any) -> list[Any]:
    """The functions that make a micro-batch's loss, wherever an assignment may replace them."""
    kind, losses = type(inner), vars(sys.modules["transformers.loss.loss_utils"])
    of_trainer, of_model, own, mapping = vars(trainer), vars(model), vars(inner), losses["LOSS_MAPPING"]
    assigned = (
        *(of_trainer.get("compute_loss"), of_model.get("forward"), own.get("forward")),
        *(own.get("_loss_function"), own.get("loss_function"), getattr(kind, "loss_function", None)),
    )
    return [
        *[each if each is None else _function(each) for each in assigned],
        type(trainer).compute_loss,
        trainer.label_smoother,
        type(model).forward,
        kind.forward,
        mapping.get(own.get("loss_type")) or mapping["ForCausalLM"],
        losses.get("fixed_cross_entropy"),
        torch.nn.functional.cross_entropy,
        torch.nn.CrossEntropyLoss.forward,
        own["training"],
    ]


def _around(trainer: Any) -> list[Any]:
    """The functions that `_unknown` asks for, but hooks."""
    accelerator, smoother = trainer.accelerator, trainer.label_smoother
    own = vars(accelerator)
    return [
        *(_function(getattr(trainer, name, None)) for name in _AROUND_THE_LOSS),
        *(type(accelerator).backward, own.get("backward")),
        *(type(accelerator).clip_grad_norm_, own.get("clip_grad_norm_")),
        *(torch.Tensor.backward, None if smoother is None else type(smoother).__call__),
    ]


def _function(value: Any) -> Any:
    """A method, which is made anew at each look-up, or a property, which takes no reference, as its function."""
    return value.__func__ if type(value) is MethodType else value.fget if type(value) is property else value


def _marks(values: list[Any]) -> list[Callable[[], Any]]:
    """References that keep nothing alive: a user's function may hold the trainer."""
    return [*map(_mark, values)]


def _mark(value: Any) -> Callable[[], Any]:
    if value is None or isinstance(value, bool):
        return lambda: value
    try:
        return weakref.ref(value)
    except TypeError:
        return object  # the same as nothing: decided again at each micro-batch


def _are(marks: list[Callable[[], Any]], values: list[Any]) -> bool:
    return len(marks) == len(values) and all(map(is_, [mark() for mark in marks], values))


def _unknown(trainer: Any, around: bool) -> str:
    """The part of a trainer's own code that is not known.

    Args:
        trainer: the trainer.
        around: whether its functions are known, and only hooks have to be asked for.
    """
    # Other code may divide the gradients after Trainer's own step has accumulated this micro-batch's.
    for name in () if around else _AROUND_THE_LOSS:
        function = getattr(trainer, name, None)
        if function is not None and _known_loss.author(function) not in ("transformers", "trl"):
            return f"{named(function)} is not transformers' own"
    hooks = getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "_optimizer_step_pre_hooks", {})
    for hook in hooks.values():
        if _known_loss.author(hook) not in (*_known_loss.MODELS, "torch", "accelerate", "deepspeed"):
            return f"the optimizer's hook {named(hook)} may divide gradients"
    if around:
        return ""
    if _known_loss.author(torch.Tensor.backward) != "torch":
        return "Tensor.backward is not torch's own"
    smoother = trainer.label_smoother
    if smoother is not None and _known_loss.author(type(smoother).__call__) != "transformers":
        return "its label_smoother is not transformers' own"
    for name in ("backward", "clip_grad_norm_"):
        own = name in vars(trainer.accelerator)
        if own or _known_loss.author(getattr(trainer.accelerator, name)) != "accelerate":
            return f"its accelerator's {name} is not accelerate's own"
    return ""


def maker(trainer: Any) -> str:
    """The owner of `compute_loss`: transformers, TRL's SFTTrainer, one of TRL's that are means, or other code."""
    function = getattr(trainer.compute_loss, "__func__", None)
    author, name = _known_loss.author(function), str(getattr(function, "__qualname__", ""))
    if author == "transformers" and name == "Trainer.compute_loss":
        return "transformers"
    if author != "trl":
        return ""
    kind = name.partition(".")[0]
    if kind == "SFTTrainer":
        return kind
    # It uses several of its own methods, which a subclass may override.
    foreign = [each for each in type(trainer).__mro__ if each.__module__.partition(".")[0] not in _known_loss.HELPERS]
    first, last = map(Version, _MEANS.get(kind, ("0", "0")))
    return "mean" if not foreign and first <= Version(sys.modules["trl"].__version__) <= last else ""


def says_what_it_divides(trainer: Any) -> bool:
    """Whether one of TRL's classes declares whether its own `compute_loss` divides for gradient accumulation.

    TRL declares it by ``loss_is_scaled_for_ga``, or, before transformers 5.19, by a string in place of a
    ``compute_loss_func``.
    """
    name = "loss_is_scaled_for_ga"
    says = isinstance(trainer.compute_loss_func, str)
    if not says and getattr(trainer, name, None) is not None and name not in vars(trainer):
        owner = next(each for each in type(trainer).__mro__ if name in vars(each))
        says = owner.__module__.partition(".")[0] == "trl"
    return says and _known_loss.author(trainer.compute_loss) == "trl"


def named(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)
