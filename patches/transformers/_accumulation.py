"""The loss of a training step: divided by the divisor that `Trainer` assumes its forward to have applied.

Only if all code that computes the loss is known by identity (`_known_loss`). The top of the autograd graph then shows
how that code used ``num_items_in_batch``. The loss of any other code is left as released.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version

import rlhf_patches

from .. import _hooks
from . import _conditions, _known_loss, _loss_graph, _router_loss

logger = logging.getLogger("rlhf_patches")

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


class _CannotTell(Exception):
    """Why the divisor of a loss is unknown."""


@dataclass
class _Computed:
    """The result of `Trainer.compute_loss`."""

    loss: torch.Tensor
    origin: _loss_graph.Origin
    reading: _loss_graph.Reading
    parts: dict[str, torch.Tensor]
    times: float | None
    """The factor for the ranks; None if it is unknown."""


@dataclass
class _Step:
    """A training step that computes its loss."""

    items: _loss_graph.Items
    smoother: Any
    computed: list[_Computed] = field(default_factory=list)

    def read(
        self, loss: torch.Tensor, parts: tuple[_loss_graph.Origin, ...] = (), *, below_factor: bool = False
    ) -> _loss_graph.Reading:
        """The terms of a loss."""
        try:
            return _loss_graph.read(loss, self.items, parts=parts, below_factor=below_factor)
        except Exception as error:  # an unforeseen graph may raise anything: no rank may stop here
            return _loss_graph.Reading(unclear={f"{type(error).__name__}: {error}"})

    def is_divided(self, loss: torch.Tensor) -> bool:
        """Whether a loss is one term, divided by the number of items: most are, and `read` takes longer to see it."""
        try:
            return _loss_graph.is_divided(loss, self.items)
        except Exception:  # as above; `read` reports it
            return False


_step: ContextVar[_Step | None] = ContextVar("step", default=None)


def loss_of(
    trainer: Any, model: torch.nn.Module, inputs: Any, items: Any, none_is_divided: bool, engine_divides: bool
) -> Any:
    """Called in ``Trainer.training_step``: the result of ``compute_loss``, corrected if the step does not divide it.

    Args:
        trainer: a Trainer, whose ``compute_loss`` may be other code.
        model: with its wrappers.
        inputs: a micro-batch.
        items: the number of items of the window, on all ranks with ``average_tokens_across_devices``; or None.
        none_is_divided: whether the step divides the loss if the number is None.
        engine_divides: whether DeepSpeed divides any loss.
    """
    if _trl_says_what_it_divides(trainer):
        _note(trainer, by=False)
        return trainer.compute_loss(model, inputs, num_items_in_batch=items)
    steps = _undivided_micro_batches(trainer, items, none_is_divided)
    if steps is None or (steps == 1 and _ranks(trainer) == 1) or _others_divide(trainer, engine_divides):
        _note_what_others_divide(trainer, steps, engine_divides)
        return trainer.compute_loss(model, inputs, num_items_in_batch=items)
    if reason := _window(trainer, model):
        _leave(trainer, model, reason, steps)
        return trainer.compute_loss(model, inputs, num_items_in_batch=items)
    smoothed = trainer.label_smoother is not None and "labels" in inputs  # the trainer removes them
    converted = trainer.accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    given = _loss_graph.Items(items, converted=converted, counts=functools.partial(_is_a_count, inputs))
    step = _Step(given, trainer.label_smoother if smoothed else None)
    token = _step.set(step)
    try:
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
    finally:
        _step.reset(token)
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None or loss.dim():
        return loss
    try:
        if any(_known_loss.author(hook) not in _known_loss.HELPERS for hook in _hooks.of(loss)):
            raise _CannotTell("the loss has a hook, which may divide its gradient")
        should_be, by = _as_it_should_be(trainer, model, step, loss, steps)
        _note(trainer, by)
        return should_be
    except _CannotTell as error:
        _leave(trainer, model, str(error), steps)
        _window(trainer, model, str(error))
        return loss


def computed(trainer: Any, loss: Any, outputs: Any, return_outputs: bool) -> Any:
    """Called in ``Trainer.compute_loss``: its result. Notes the loss's terms if a training step waits for them."""
    step = _step.get()
    if step is not None and isinstance(loss, torch.Tensor) and loss.grad_fn is not None and not loss.dim():
        step.computed.append(_noted(trainer, step, loss, outputs))
    return (loss, outputs) if return_outputs else loss


def _noted(trainer: Any, step: _Step, loss: torch.Tensor, outputs: Any) -> _Computed:
    origin = _loss_graph.origin(loss)
    if step.is_divided(loss) or (step.smoother is not None and _smoother_divides(step.smoother)):
        # The smoother divides in part by a multiple of the number, which the graph does not show.
        return _Computed(loss, origin, _loss_graph.Reading(window=True), {}, None)
    parts = dict(_numbers(outputs, loss))
    ranks = _ranks(trainer)
    times_one = ranks == 1 and trainer.args.average_tokens_across_devices and step.items.value is not None
    reading = step.read(loss, tuple(map(_loss_graph.origin, parts.values())), below_factor=times_one)
    if reading.parts and any(name != "aux_loss" and step.read(part).window for name, part in parts.items()):
        parts = {}  # the parts themselves are divided
        reading = step.read(loss, below_factor=times_one)
    times = 1.0 if ranks == 1 else _loss_graph.factor(loss)
    return _Computed(loss, origin, reading, parts, times)


# -- whether the code is known


@dataclass(frozen=True)
class _Window:
    """The result of the code check at the first micro-batch of a window, for all its micro-batches."""

    trainer: weakref.ref[Any]
    model: weakref.ref[Any]
    state: weakref.ref[Any]
    """Each training has its own state, which starts at step 0 again."""
    step: int
    reason: str


_last: _Window | None = None


def _window(trainer: Any, model: torch.nn.Module, reason: str | None = None) -> str:
    """Why the loss of this window is left as released; empty if the code that computes it is known.

    If ``reason`` is given, which means that a loss could not be read, this trainer's losses are left for the rest of
    its training: no window mixes both.
    """
    global _last
    last, step = _last, trainer.state.global_step
    same = last is not None and last.trainer() is trainer and last.model() is model
    same = same and last is not None and last.state() is trainer.state
    if reason is not None:
        step = -1
    elif same and last is not None and last.step in (step, -1):
        return last.reason
    else:
        reason = _unknown(trainer) or _known_loss.unknown(model)
    _last = _Window(weakref.ref(trainer), weakref.ref(model), weakref.ref(trainer.state), step, reason)
    return reason


def _unknown(trainer: Any) -> str:
    """The part of a trainer's own code that is not known."""
    # Other code may divide the gradients after Trainer's own step has accumulated this micro-batch's.
    for name in _AROUND_THE_LOSS:
        function = getattr(trainer, name, None)
        if function is not None and _known_loss.author(function) not in ("transformers", "trl"):
            return f"{_named(function)} is not transformers' own"
    hooks = getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "_optimizer_step_pre_hooks", {})
    for hook in hooks.values():
        if _known_loss.author(hook) not in (*_known_loss.MODELS, "torch", "accelerate", "deepspeed"):
            return f"the optimizer's hook {_named(hook)} may divide gradients"
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


def _maker(trainer: Any) -> str:
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


def _trl_says_what_it_divides(trainer: Any) -> bool:
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


def _undivided_micro_batches(trainer: Any, items: Any, none_is_divided: bool) -> int | None:
    """The number of micro-batches by which the step does not divide, because it assumes that the loss is divided.

    None if there is nothing to check: the step divides the loss, or its user has declared how the loss is scaled.
    """
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if trainer.compute_loss_func is not None or not trainer.model_accepts_loss_kwargs or declared:
        return None  # a compute_loss_func divides by the number, as transformers requires
    if items is None and none_is_divided:
        return None
    # Of this window: the last of an epoch may have fewer.
    steps = getattr(trainer, "current_gradient_accumulation_steps", None) or trainer.args.gradient_accumulation_steps
    if trainer.args.n_gpu > 1:
        _say(
            trainer, "several GPUs in one process (torch.nn.DataParallel): the divisor of their losses is not checked."
        )
        return None
    return 1 if declared is False else int(steps)


def _others_divide(trainer: Any, engine_divides: bool) -> bool:
    """Whether the backward pass begins with a division by the number of micro-batches."""
    if trainer.accelerator.distributed_type == "DEEPSPEED":
        return engine_divides
    steps = trainer.accelerator.gradient_accumulation_steps
    if steps > 1:
        _say(
            trainer,
            f"the Accelerator divides every loss by {steps} (ACCELERATE_GRADIENT_ACCUMULATION_STEPS, or accelerate's"
            " launcher, sets it), and Trainer divides for the accumulation itself. Both are left as released:"
            f" a loss that is divided by num_items_in_batch gets a gradient that is {steps} times too small.",
        )
    return bool(steps > 1)


def _is_a_count(inputs: Any, number: float) -> bool:
    """Whether a number is the number of a micro-batch's samples, or of all its tokens."""
    tensors = (
        [each for each in inputs.values() if isinstance(each, torch.Tensor)] if isinstance(inputs, Mapping) else []
    )
    return any(number in (each.numel(), *each.shape[:1]) for each in tensors)


def _ranks(trainer: Any) -> int:
    """The factor by which a loss may be multiplied."""
    return int(trainer.accelerator.num_processes) if trainer.args.average_tokens_across_devices else 1


def _numbers(outputs: Any, loss: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's outputs besides its loss that may be terms of the loss."""
    named = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs if isinstance(outputs, tuple) else ()))
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value is not loss and value.numel() == 1 and value.grad_fn is not None:
            yield str(name), value


def _smoother_divides(smoother: Any) -> bool:
    """Whether this release's label smoother takes the number; smoothers that take it divide by it."""
    return "num_items_in_batch" in type(smoother).__call__.__code__.co_varnames


# -- the corrected loss


_Repaired = tuple[torch.Tensor, bool | float]
"""A loss, and the factor by which its gradient was too large; True if it is no factor, False if it was right."""


def _as_it_should_be(trainer: Any, model: torch.nn.Module, step: _Step, loss: torch.Tensor, steps: int) -> _Repaired:
    """The loss of the step.

    Raises:
        _CannotTell: its divisor is unknown.
    """
    maker = _maker(trainer)
    if maker == "mean":
        return loss / steps, float(steps)
    (one, *more) = step.computed or (None,)
    handed_on = one is not None and not more and one.loss is loss and one.origin == _loss_graph.origin(loss)
    if not handed_on or one is None:
        if maker == "SFTTrainer":  # it divides by the number itself
            return loss, False
        raise _CannotTell(f"{_named(trainer.compute_loss)} is not transformers' own")
    reading = one.reading
    if reading.as_released:
        return loss, False
    plain = reading.plain and not reading.hidden and reading.means == {one.times}
    if not (maker or reading.window or plain):
        raise _CannotTell(f"{_named(trainer.compute_loss)} is not transformers' own")
    return _repaired(model, one, loss, steps) if reading.window else _averaged(one, loss, steps)


def _repaired(model: torch.nn.Module, computed: _Computed, loss: torch.Tensor, steps: int) -> _Repaired:
    """A loss that is divided by the number of items, without the excess of its other parts."""
    reading = computed.reading
    if reading.means or reading.unclear:
        raise _CannotTell(f"a part of its loss is divided, another one is not ({_listed(reading.unclear) or 'a mean'})")
    scales = dict(reading.parts)
    if reading.compiled and (coefficient := _router_loss._coefficient(model)) and "aux_loss" in computed.parts:
        place = list(computed.parts).index("aux_loss")  # within the region, which hides it
        scales[place] = coefficient * (computed.times or 1.0) + (scales.get(place) or 0.0)
    parts = list(computed.parts.values())
    for place, scale in scales.items() if steps > 1 else ():
        if scale is None:
            raise _CannotTell("a part of its loss is not divided, and its weight is unknown")
        loss = loss - (1 - 1 / steps) * scale * parts[place].to(loss.device)
    return loss, bool(scales) and steps > 1


def _averaged(computed: _Computed, loss: torch.Tensor, steps: int) -> _Repaired:
    """A loss in which no visible term is divided by the number of items."""
    reading, times = computed.reading, computed.times
    # Known code divides last, by that very tensor or a copy on another device: not below a mean.
    copies = {each for each in reading.hidden if each.endswith(_loss_graph.ELSEWHERE) or each == _loss_graph.COMPILED}
    if reading.unclear or copies:
        raise _CannotTell(f"its loss was computed by {_listed(reading.unclear | copies)}")
    if reading.sums or reading.parts or times is None:
        raise _CannotTell("a part of its loss is a mean, another one is not" if times else "hooks hold its factor")
    return loss / (steps * times), steps * times


def _note_what_others_divide(trainer: Any, steps: int | None, engine_divides: bool) -> None:
    """Reports a loss that this module does not check, unless its user has declared how it is scaled."""
    by_engine = engine_divides and trainer.accelerator.distributed_type == "DEEPSPEED"
    said = trainer.compute_loss_func is not None or getattr(trainer, "loss_is_scaled_for_ga", None)
    if not said and trainer.args.n_gpu <= 1 and (steps is None or by_engine):
        _note(trainer, by=False)


def _note(trainer: Any, by: bool | float) -> None:
    """For the report, once in a call; `conditions.alone` has reported a step of one micro-batch on one rank."""
    if _conditions.alone(trainer) is not None or _divides_twice():
        return
    rlhf_patches.decided("transformers-accumulation-scale", by if by is True or by != 1 else False)


@functools.cache
def _divides_twice() -> bool:
    """Whether the Accelerator of this release divides as well, which this patch removes: it repairs each loss."""
    return Version("5.2.0") <= Version(sys.modules["transformers"].__version__) < Version("5.5.4")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _named(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__name__)


def _leave(trainer: Any, model: torch.nn.Module, reason: str, steps: int) -> None:
    names = f"{type(_known_loss.unwrapped(model)).__name__} in {type(trainer).__name__}"
    _say(
        trainer,
        f"the loss of {names} is left as released: {reason}. If it is not divided by num_items_in_batch, its gradient"
        f" is {steps * _ranks(trainer)} times too large; `rlhf-patches rehearse -- COMMAND` measures that.",
        about=names,
    )


def _say(trainer: Any, text: str, about: str = "") -> None:
    """Once in a process for each thing, on rank 0."""
    if trainer.args.process_index == 0 and (about or text) not in _logged:
        _logged.add(about or text)
        logger.warning("transformers-accumulation-scale: %s", text)


_logged: set[str] = set()
