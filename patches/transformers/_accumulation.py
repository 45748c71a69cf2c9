"""The loss of a training step: divided by the divisor that `Trainer` assumes its forward to have applied.

Only if all code that computes the loss is known by identity (`_known_loss`). The top of the autograd graph then shows
how that code used ``num_items_in_batch``. The loss of any other code is left as released.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from packaging.version import Version

import rlhf_patches

from .. import _hooks
from . import _conditions, _known_loss, _known_trainer, _loss_graph, _router_loss

logger = logging.getLogger("rlhf_patches")

# known here: code of another package than those of `_known_loss` and `_known_trainer` is left as released.


class _CannotTell(Exception):
    """Why the divisor of a loss is unknown."""


class _Computed(NamedTuple):
    """The result of `Trainer.compute_loss`."""

    loss: torch.Tensor
    node: Any
    """Of its graph; an operation in place adds another one."""
    reading: _loss_graph.Reading
    parts: dict[str, torch.Tensor]
    times: float | None
    """The factor for the ranks; None if it is unknown."""


class _Settings(NamedTuple):
    """What a window's first micro-batch shows of all of them."""

    steps: int
    """The number of micro-batches by which the step does not divide."""
    converted: bool
    """Whether a wrapper may have converted the number of items."""
    is_noted: bool
    """Whether the report's condition is decided by the losses."""


class _Step:
    """A training step that computes its loss."""

    __slots__ = ("computed", "items", "smoother")

    def __init__(self, items: _loss_graph.Items, smoother: Any) -> None:
        self.items, self.smoother = items, smoother
        self.computed: list[_Computed] = []

    def read(
        self, loss: torch.Tensor, parts: tuple[_loss_graph.Origin, ...] = (), *, below_factor: bool = False
    ) -> _loss_graph.Reading:
        """The terms of a loss."""
        try:
            return _loss_graph.read(loss, self.items, parts=parts, below_factor=below_factor)
        except Exception as error:  # an unforeseen graph may raise anything: no rank may stop here
            return _loss_graph.Reading(unclear={f"{type(error).__name__}: {error}"})


_DIVIDED = _loss_graph.Reading(window=True)
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
    window = _known_trainer.held(trainer, model)
    if window is None or window.settings is None or items is None:
        window = _looked_at(trainer, model, items, none_is_divided, engine_divides)
        if window is None:
            return trainer.compute_loss(model, inputs, num_items_in_batch=items)
    settings: _Settings = window.settings
    smoother = trainer.label_smoother
    if smoother is not None and "labels" not in inputs:  # otherwise the trainer removes them
        smoother = None
    step = _Step(_loss_graph.Items(items, converted=settings.converted, counts=inputs), smoother)
    token = _step.set(step)
    try:
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
    finally:
        _step.reset(token)
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None or loss.dim():
        return loss
    try:
        hooked = loss._backward_hooks or loss._post_accumulate_grad_hooks
        if hooked and any(_known_loss.author(hook) not in _known_loss.HELPERS for hook in _hooks.of(loss)):
            raise _CannotTell("the loss has a hook, which may divide its gradient")
        should_be, by = _as_it_should_be(trainer, window.maker, model, step, loss, settings.steps)
        if settings.is_noted:
            _note(by)
        return should_be
    except _CannotTell as error:
        _leave(trainer, model, str(error), settings.steps)
        _known_trainer.window(trainer, model, str(error))
        return loss


def _looked_at(
    trainer: Any, model: torch.nn.Module, items: Any, none_is_divided: bool, engine_divides: bool
) -> _known_trainer.Window | None:
    """The record of this window, with its settings; None if the loss of this micro-batch is left as released."""
    if _known_trainer.says_what_it_divides(trainer):
        if _is_noted(trainer):
            _note(by=False)
        return None
    steps = _undivided_micro_batches(trainer, items, none_is_divided)
    if steps is None or (steps == 1 and _ranks(trainer) == 1) or _others_divide(trainer, engine_divides):
        if _others_are_noted(trainer, steps, engine_divides) and _is_noted(trainer):
            _note(by=False)
        return None
    window = _known_trainer.window(trainer, model)
    if window.reason:
        _leave(trainer, model, window.reason, steps)
        return None
    converted = trainer.accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    window.settings = _Settings(steps, converted, _is_noted(trainer))
    return window


def computed(trainer: Any, loss: Any, outputs: Any, return_outputs: bool) -> Any:
    """Called in ``Trainer.compute_loss``: its result. Notes the loss's terms if a training step waits for them."""
    step = _step.get()
    if step is not None and isinstance(loss, torch.Tensor) and loss.grad_fn is not None and not loss.dim():
        step.computed.append(_noted(trainer, step, loss, outputs))
    return (loss, outputs) if return_outputs else loss


def _noted(trainer: Any, step: _Step, loss: torch.Tensor, outputs: Any) -> _Computed:
    # The smoother divides in part by a multiple of the number, which the graph does not show.
    if _loss_graph.is_divided(loss, step.items) or (step.smoother is not None and _smoother_divides(step.smoother)):
        return _Computed(loss, loss.grad_fn, _DIVIDED, {}, None)
    parts = dict(_numbers(outputs, loss))
    ranks = _ranks(trainer)
    times_one = ranks == 1 and trainer.args.average_tokens_across_devices and step.items.value is not None
    reading = step.read(loss, tuple(map(_loss_graph.origin, parts.values())), below_factor=times_one)
    if reading.parts and any(name != "aux_loss" and step.read(part).window for name, part in parts.items()):
        parts = {}  # the parts themselves are divided
        reading = step.read(loss, below_factor=times_one)
    times = 1.0 if ranks == 1 else _loss_graph.factor(loss)
    return _Computed(loss, loss.grad_fn, reading, parts, times)


def _undivided_micro_batches(trainer: Any, items: Any, none_is_divided: bool) -> int | None:
    """The number of micro-batches by which the step does not divide, because it assumes that the loss is divided.

    None if there is nothing to check: the step divides the loss, or its user has declared how the loss is scaled.
    """
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if trainer.compute_loss_func is not None or not trainer.model_accepts_loss_kwargs or declared:
        return None  # a compute_loss_func divides by the number, as transformers requires
    if items is None and none_is_divided:
        return None
    if trainer.args.n_gpu > 1:
        _say(
            trainer, "several GPUs in one process (torch.nn.DataParallel): the divisor of their losses is not checked."
        )
        return None
    return 1 if declared is False else _known_trainer.micro_batches(trainer)


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


def _as_it_should_be(
    trainer: Any, maker: str, model: torch.nn.Module, step: _Step, loss: torch.Tensor, steps: int
) -> _Repaired:
    """The loss of the step.

    Raises:
        _CannotTell: its divisor is unknown.
    """
    if maker == "mean":
        return loss / steps, float(steps)
    (one, *more) = step.computed or (None,)
    handed_on = one is not None and not more and one.loss is loss and one.node is loss.grad_fn
    if not handed_on or one is None:
        if maker == "SFTTrainer":  # it divides by the number itself
            return loss, False
        raise _CannotTell(f"{_known_trainer.named(trainer.compute_loss)} is not transformers' own")
    reading = one.reading
    if reading.as_released:
        return loss, False
    plain = reading.plain and not reading.hidden and reading.means == {one.times}
    if not (maker or reading.window or plain):
        raise _CannotTell(f"{_known_trainer.named(trainer.compute_loss)} is not transformers' own")
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
        loss = torch.sub(loss, parts[place].to(loss.device), alpha=(1 - 1 / steps) * scale)
    return loss, bool(scales) and steps > 1


def _averaged(computed: _Computed, loss: torch.Tensor, steps: int) -> _Repaired:
    """A loss in which no visible term is divided by the number of items."""
    reading, times = computed.reading, computed.times
    # Known code divides last, by that very tensor or a copy on another device: not below a mean.
    copies = [each for each in reading.hidden if each.endswith(_loss_graph.ELSEWHERE) or each == _loss_graph.COMPILED]
    if reading.unclear or copies:
        raise _CannotTell(f"its loss was computed by {_listed({*reading.unclear, *copies})}")
    if reading.sums or reading.parts or times is None:
        raise _CannotTell("a part of its loss is a mean, another one is not" if times else "hooks hold its factor")
    return loss / (steps * times), steps * times


def _others_are_noted(trainer: Any, steps: int | None, engine_divides: bool) -> bool:
    """Whether to report a loss that this module does not check: unless its user has declared how it is scaled."""
    by_engine = engine_divides and trainer.accelerator.distributed_type == "DEEPSPEED"
    said = trainer.compute_loss_func is not None or getattr(trainer, "loss_is_scaled_for_ga", None)
    return not said and trainer.args.n_gpu <= 1 and (steps is None or by_engine)


def _is_noted(trainer: Any) -> bool:
    """Whether the losses decide for the report: not in a step of one micro-batch on one rank (`_conditions.alone`)."""
    return _conditions.alone(trainer) is None and not _divides_twice()


def _note(by: bool | float) -> None:
    """For the report, once in a call."""
    rlhf_patches.decided("transformers-accumulation-scale", by if by is True or by != 1 else False)


@functools.cache
def _divides_twice() -> bool:
    """Whether the Accelerator of this release divides as well, which this patch removes: it repairs each loss."""
    return Version("5.2.0") <= Version(sys.modules["transformers"].__version__) < Version("5.5.4")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _leave(trainer: Any, model: torch.nn.Module, reason: str, steps: int) -> None:
    if trainer.args.process_index != 0:
        return
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
