"""The loss of a training step: divided by what its forward was believed to have divided it by, where it has not."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from . import item_users, loss_graph, router_loss

logger = logging.getLogger("rlhf_patches")


@dataclass
class _Computed:
    """What `Trainer.compute_loss` returned."""

    origin: loss_graph.Origin
    reading: loss_graph.Reading
    parts: dict[str, torch.Tensor]
    times: float | None
    """What it was multiplied with for the ranks; None where that is not known."""
    kept: torch.Tensor
    """The same, for a trainer of others, which may change it in place."""
    smoother: Any
    """What computed it from the model's logits, if not the model."""


@dataclass
class _Step:
    """A training step that computes its loss."""

    items: loss_graph.Items
    smoother: Any
    computed: list[_Computed] = field(default_factory=list)

    def read(
        self, loss: torch.Tensor, parts: Sequence[loss_graph.Origin] = (), *, below_factor: bool = False
    ) -> loss_graph.Reading:
        """The terms of a loss."""
        try:
            return loss_graph.read(loss, self.items, parts=parts, below_factor=below_factor)
        except Exception as error:  # of what was not foreseen in a graph: no rank may stop here
            return loss_graph.Reading(unclear={f"{type(error).__name__}: {error}"})

    def is_divided(self, loss: torch.Tensor) -> bool:
        """Whether a loss is one term, divided by the number of items: most are, and `read` takes longer to say so."""
        try:
            return loss_graph.is_divided(loss, self.items)
        except Exception:  # as above; `read` says so
            return False


_step: ContextVar[_Step | None] = ContextVar("step", default=None)


class _CannotTell(Exception):
    """Why it is not known what a loss was divided by."""


def loss_of(
    trainer: Any, model: torch.nn.Module, inputs: Any, items: Any, none_is_divided: bool, engine_divides: bool
) -> Any:
    """In ``Trainer.training_step``: what ``compute_loss`` returns, as it has to be where the step does not divide it.

    Args:
        trainer: a Trainer, whose ``compute_loss`` may be another's.
        model: as it is wrapped.
        inputs: a micro-batch.
        items: the number of items of the window, on all ranks with ``average_tokens_across_devices``; or None.
        none_is_divided: whether the step divides the loss where the number is None.
        engine_divides: whether DeepSpeed does, whatever the loss is.
    """
    steps = _undivided_micro_batches(trainer, items, none_is_divided)
    if steps is None or (steps == 1 and _ranks(trainer) == 1) or _others_divide(trainer, engine_divides):
        return trainer.compute_loss(model, inputs, num_items_in_batch=items)
    smoothed = trainer.label_smoother is not None and "labels" in inputs  # which are taken out
    converted = trainer.accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    counts = functools.partial(_is_a_count, inputs)
    given = loss_graph.Items(items, converted=converted, counts=counts)
    step = _Step(given, trainer.label_smoother if smoothed else None)
    token = _step.set(step)
    try:
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=items)
    finally:
        _step.reset(token)
    if not isinstance(loss, torch.Tensor) or loss.grad_fn is None or loss.dim():
        return loss
    try:
        if trainer.compute_loss_func is not None:
            _check_function(trainer, model, step)
            return loss
        return _as_it_should_be(trainer, model, step, loss, steps)
    except _CannotTell as error:
        names = f"{type(router_loss.unwrapped(model)).__name__} in {type(trainer).__name__}"
        _say(
            f"whether the loss of {names} is divided by num_items_in_batch cannot be told: {error}. It is left as"
            f" released; if it is not divided, its gradient is {steps * _ranks(trainer)} times too large.",
            about=names,
        )
        return loss


def computed(trainer: Any, loss: Any, outputs: Any, return_outputs: bool) -> Any:
    """In ``Trainer.compute_loss``: what it returns. Its terms are noted where a training step waits for them."""
    step = _step.get()
    if step is not None and isinstance(loss, torch.Tensor) and loss.grad_fn is not None and not loss.dim():
        step.computed.append(_noted(trainer, step, loss, outputs))
    return (loss, outputs) if return_outputs else loss


def _noted(trainer: Any, step: _Step, loss: torch.Tensor, outputs: Any) -> _Computed:
    origin, kept = loss_graph.origin(loss), loss if _is_transformers(trainer) else loss.clone()
    if step.is_divided(loss) or (step.smoother is not None and _smoother_divides(step.smoother)):
        # The smoother divides in part by a multiple of the number, which is not seen.
        return _Computed(origin, loss_graph.Reading(window=True), {}, None, kept, step.smoother)
    parts = dict(_numbers(outputs, loss))
    ranks = _ranks(trainer)
    times_one = ranks == 1 and trainer.args.average_tokens_across_devices and step.items.value is not None
    reading = step.read(loss, list(map(loss_graph.origin, parts.values())), below_factor=times_one)
    if reading.parts and any(name != "aux_loss" and step.read(part).window for name, part in parts.items()):
        parts = {}  # which have been divided themselves
        reading = step.read(loss, below_factor=times_one)
    times = 1.0 if ranks == 1 else loss_graph.factor(loss)
    return _Computed(origin, reading, parts, times, kept, step.smoother)


def _undivided_micro_batches(trainer: Any, items: Any, none_is_divided: bool) -> int | None:
    """The number of micro-batches by which the step does not divide, as it believes that the loss is divided.

    None where nothing has to be looked at: the step divides what it is given, or its user has said what that is.
    """
    believed = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    declared = getattr(trainer, "loss_is_scaled_for_ga", None)
    if not believed or declared or (items is None and none_is_divided):
        return None
    # Of this window: the last of an epoch may have fewer.
    steps = getattr(trainer, "current_gradient_accumulation_steps", None) or trainer.args.gradient_accumulation_steps
    if trainer.args.n_gpu > 1:
        _say("several GPUs in one process (torch.nn.DataParallel): what divides their losses is not looked at.")
        return None
    return 1 if declared is False else int(steps)


def _others_divide(trainer: Any, engine_divides: bool) -> bool:
    """Whether the backward pass begins with a division by the number of micro-batches."""
    if trainer.accelerator.distributed_type == "DEEPSPEED":
        return engine_divides
    steps = trainer.accelerator.gradient_accumulation_steps
    if steps > 1:
        _say(
            f"the Accelerator divides every loss by {steps} (ACCELERATE_GRADIENT_ACCUMULATION_STEPS, or accelerate's"
            " launcher, sets it), and Trainer divides for the accumulation itself. What each does is left as released:"
            f" a loss that is divided by num_items_in_batch gets a gradient that is {steps} times too small."
        )
    return bool(steps > 1)


def _is_a_count(inputs: Any, number: float) -> bool:
    """Whether a number is that of a micro-batch's samples, or of all its tokens."""
    tensors = (
        [each for each in inputs.values() if isinstance(each, torch.Tensor)] if isinstance(inputs, Mapping) else []
    )
    return any(number in (each.numel(), *each.shape[:1]) for each in tensors)


def _ranks(trainer: Any) -> int:
    """By which a loss may be multiplied."""
    return int(trainer.accelerator.num_processes) if trainer.args.average_tokens_across_devices else 1


def _is_transformers(trainer: Any) -> bool:
    transformers = sys.modules["transformers.trainer"]
    return getattr(trainer.compute_loss, "__func__", None) is transformers.Trainer.compute_loss


def _numbers(outputs: Any, loss: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a model returns beside its loss that may be a term of it."""
    named = outputs if isinstance(outputs, Mapping) else dict(enumerate(outputs if isinstance(outputs, tuple) else ()))
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and value is not loss and value.numel() == 1 and value.grad_fn is not None:
            yield str(name), value


# -- what is to be made of it


def _as_it_should_be(trainer: Any, model: torch.nn.Module, step: _Step, loss: torch.Tensor, steps: int) -> torch.Tensor:
    """The loss of the step.

    Raises:
        _CannotTell: it is not known what it is divided by.
    """
    if len(step.computed) == 1 and step.computed[0].origin == loss_graph.origin(loss):
        return _repaired(trainer, model, step.computed[0], loss, steps)
    reading = step.read(loss, [each.origin for each in step.computed])
    added_up = not reading.means and not reading.unclear
    if added_up and all(each.reading.as_released for each in step.computed):
        return loss
    if item_users.names(trainer, "gradient_accumulation_steps"):
        raise _CannotTell("its compute_loss deals with accumulation itself")
    if not reading.parts:
        if _is_transformers(trainer):
            raise _CannotTell("it is not the model's own")
        may_use = functools.partial(item_users.may_give, trainer, model)
        return _averaged(trainer, loss, reading, steps, 1.0, may_use, trusted=False)
    scales = {place: scale for place, scale in reading.parts.items() if scale is not None}
    if reading.unclear or len(scales) < len(reading.parts):
        raise _CannotTell(f"it is made of the model's by {_listed(reading.unclear) or 'more than adding'}")
    sums = reading.window or reading.sums
    if (not added_up and (sums or reading.hidden)) or (sums and not all(e.reading.as_released for e in step.computed)):
        raise _CannotTell("what is added to the model's may be divided by it in part")
    if _may_be_divided({*scales.values(), *reading.products}, 1.0, steps, trainer):
        raise _CannotTell("its compute_loss divides by the number of micro-batches")
    wanted, released = loss.new_zeros(()), loss.new_zeros(())
    for place, scale in scales.items():
        each = step.computed[place]
        wanted = wanted + scale * _repaired(trainer, model, each, each.kept, steps)
        released = released + scale * each.kept
    added = loss - released
    return wanted + (added if added_up else added / steps)


def _repaired(
    trainer: Any, model: torch.nn.Module, computed: _Computed, loss: torch.Tensor, steps: int
) -> torch.Tensor:
    """What a model's own loss, which `Trainer.compute_loss` returned as ``loss``, should be."""
    reading = computed.reading
    if reading.as_released:
        return loss
    trusted = router_loss._author(router_loss.unwrapped(model)) in router_loss._MODELS
    if not reading.window:
        may_use = functools.partial(item_users.may_use, model)
        if computed.smoother is not None:
            trusted, may_use = True, functools.partial(_smoother_divides, computed.smoother)
        elif reading.unclear == {"CompiledFunction"} and trusted and not _adds_up(model):
            reading = loss_graph.Reading(means={computed.times or 1.0}, hidden=reading.unclear)
        return _averaged(trainer, loss, reading, steps, computed.times, may_use, trusted=trusted)
    if reading.means or reading.unclear or not trusted:
        raise _CannotTell(f"a part of it is, another one is not ({_listed(reading.unclear) or 'a mean'})")
    scales = dict(reading.parts)
    if reading.compiled and (coefficient := router_loss._coefficient(model)) and "aux_loss" in computed.parts:
        place = list(computed.parts).index("aux_loss")  # within the region, where it cannot be seen
        scales[place] = coefficient * (computed.times or 1.0) + (scales.get(place) or 0.0)
    parts = list(computed.parts.values())
    for place, scale in scales.items() if steps > 1 else ():
        if scale is None:
            raise _CannotTell("a part of it is not, with a weight that is not known")
        loss = loss - (1 - 1 / steps) * scale * parts[place].to(loss.device)
    return loss


def _averaged(
    trainer: Any,
    loss: torch.Tensor,
    reading: loss_graph.Reading,
    steps: int,
    times: float | None,
    may_use: Callable[[], bool],
    *,
    trusted: bool,
) -> torch.Tensor:
    """What a loss should be in which nothing was seen that is divided by the number of items.

    ``trusted`` if it is code that does not make a Python number of that, nor a weight: transformers' own.
    """
    if reading.unclear:
        raise _CannotTell(f"it was computed by {_listed(reading.unclear)}")
    # Transformers' own code divides by that very tensor, or by a copy on another device.
    hidden = reading.hidden - {loss_graph.BY_A_TENSOR} if trusted else reading.hidden
    if (hidden or not (trusted or (reading.plain and reading.means == {times}))) and may_use():
        raise _CannotTell(f"its code may use it ({_listed(hidden) or 'as a number or a weight'})")
    if reading.as_released:
        return loss
    if reading.sums or reading.parts or times is None:
        raise _CannotTell("a part of it is a mean, another one is not" if times else "hooks hold what multiplies it")
    if not trusted and _may_be_divided(reading.products, times, steps, trainer):
        raise _CannotTell("it is divided by the number of micro-batches")
    return loss / (steps * times)


def _may_be_divided(scales: set[float], times: float, steps: int, trainer: Any) -> bool:
    """Whether one of these numbers is that which divides for the accumulation, of this window or of a full one."""
    full = trainer.args.gradient_accumulation_steps
    return full > 1 and any(math.isclose(scale * number, times) for scale in scales for number in (steps, full))


def _adds_up(model: torch.nn.Module) -> bool:
    """Whether a transformers model's loss may be a sum over samples: that of CTC, if it is configured so."""
    config = getattr(router_loss.unwrapped(model), "config", None)
    return getattr(config, "ctc_loss_reduction", "mean") != "mean"


def _smoother_divides(smoother: Any) -> bool:
    return "num_items_in_batch" in item_users.references(type(smoother).__call__.__code__)


def _check_function(trainer: Any, model: torch.nn.Module, step: _Step) -> None:
    """A ``compute_loss_func`` is the user's, who alone knows what it divides by. Not to use the number is an error."""
    for each in step.computed:
        averaged = each.reading.means and not (each.reading.window or each.reading.unclear)
        if averaged and not item_users.may_use(model, trainer.compute_loss_func):
            _say(
                "compute_loss_func does not use num_items_in_batch, as transformers takes for granted: its gradient"
                " counts once for each micro-batch of a step and each rank. Divide what it sums by that number."
            )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _say(text: str, about: str = "") -> None:
    """Once in a process for each thing."""
    if (about or text) not in _said:
        _said.add(about or text)
        logger.warning("transformers-accumulation-scale: %s", text)


_said: set[str] = set()
