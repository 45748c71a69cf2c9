"""Whether the code of a trainer and of its model's loss is known by identity: decided at a window's first micro-batch.

It is decided again as soon as a function that makes the loss has been replaced, so a micro-batch only compares these.
"""

from __future__ import annotations

import sys
import weakref
from types import MethodType
from typing import Any

import torch
from packaging.version import Version
from torch.optim import optimizer as torch_optimizer

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


class _Identities:
    """Which objects these are. Their ids tell: as soon as one of them is freed, so that its id may return, none is."""

    __slots__ = ("_freed", "_ids", "_references")

    def __init__(self, objects: list[Any]) -> None:
        self._ids = [*map(id, objects)]
        self._freed: list[object] = []
        self._references: list[object] = []  # a user's function may hold the trainer: they keep nothing alive
        for each in objects:
            if each is not None and not isinstance(each, bool):
                try:
                    self._references.append(weakref.ref(each, self._freed.append))
                except TypeError:
                    self._freed.append(None)  # decided again at each micro-batch

    def are(self, objects: list[Any]) -> bool:
        return not self._freed and self._ids == [*map(id, objects)]


class Window:
    """What is known of the code of a window's losses.

    Attributes:
        reason: why the loss is left as released; empty if all code is known.
        maker: see `maker`.
        settings: those of `_accumulation`, which are the window's.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, reason: str, *, for_good: bool = False) -> None:
        inner = _known_loss.unwrapped(model)
        self._inner = weakref.ref(inner)
        self._at = None if for_good else _at(trainer)
        self.reason, self.maker = reason, maker(trainer)
        self.settings: Any = None
        self._used = _Identities(self._in_use(trainer, model, inner))
        self._around = None if reason else _Identities([trainer, *_around(trainer)])

    def holds(self, trainer: Any, model: torch.nn.Module) -> bool:
        """Whether this is still the trainer's window, and what makes its loss has not been replaced since."""
        if self._at not in (None, _at(trainer)):
            return False
        inner = self._inner()
        return inner is not None and self._used.are(self._in_use(trainer, model, inner))

    def _in_use(self, trainer: Any, model: Any, inner: Any) -> list[Any]:
        # Each training has its own state, which starts at step 0 again.
        objects = [trainer, model, inner, trainer.state]
        return objects if self.reason else objects + _functions(trainer, model, inner)

    def is_around(self, trainer: Any) -> bool:
        """Whether the trainer's other code was known here, and has not been replaced since."""
        return self._around is not None and self._around.are([trainer, *_around(trainer)])


_last: Window | None = None


def held(trainer: Any, model: torch.nn.Module) -> Window | None:
    """The record of this window, if there is one and all of it still holds."""
    last = _last  # another thread's training may replace it meanwhile
    return last if last is not None and last.holds(trainer, model) else None


def window(trainer: Any, model: torch.nn.Module, reason: str | None = None) -> Window:
    """The record of this window.

    If ``reason`` is given, which means that a loss could not be read, this trainer's losses are left for the rest of
    its training: no window mixes both.
    """
    global _last
    if reason is None:
        if (found := held(trainer, model)) is not None:
            return found
        around = _last is not None and _last.is_around(trainer)
        found = Window(trainer, model, _unknown(trainer, around) or _known_loss.unknown(model))
    else:
        found = Window(trainer, model, reason, for_good=True)
    _last = found
    return found


def micro_batches(trainer: Any) -> int:
    """Of this window: the last of an epoch may have fewer."""
    current = getattr(trainer, "current_gradient_accumulation_steps", None)
    return int(current or trainer.args.gradient_accumulation_steps)


def _at(trainer: Any) -> tuple[int, int]:
    # A stream's last window may have no step: the next epoch's first one, of more micro-batches, then has its number.
    return trainer.state.global_step, micro_batches(trainer)


def _functions(trainer: Any, model: Any, inner: Any) -> list[Any]:
    """What decides about a micro-batch's loss, wherever an assignment may replace it."""
    kind, losses = type(inner), sys.modules["transformers.loss.loss_utils"].__dict__
    of_trainer, own, mapping = trainer.__dict__.get, inner.__dict__.get, losses["LOSS_MAPPING"]
    assigned = (of_trainer("compute_loss"), model.__dict__.get("forward"), own("forward"), own("loss_function"))
    loss_function = getattr(kind, "loss_function", None)
    return [
        *[each if each is None else _function(each) for each in assigned],
        loss_function.fget if type(loss_function) is property else loss_function,
        own("_loss_function"),
        of_trainer("compute_loss_func"),
        of_trainer("model_accepts_loss_kwargs"),
        of_trainer("loss_is_scaled_for_ga"),
        type(trainer).compute_loss,
        trainer.label_smoother,
        type(model).forward,
        kind.forward,
        mapping.get(own("loss_type")) or mapping["ForCausalLM"],
        losses.get("fixed_cross_entropy"),
        torch.nn.functional.cross_entropy,
        torch.nn.CrossEntropyLoss.forward,
        own("training"),
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
    own = getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "_optimizer_step_pre_hooks", {})
    for hook in (*own.values(), *getattr(torch_optimizer, "_global_optimizer_pre_hooks", {}).values()):
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
