"""GKD's and GOLD's number of tokens of a window: those that were generated, in place of the data set's.

GOLD generates all micro-batches of a window before the first loss. GKD generates each before its own loss, so it knows
the number at the last one. The micro-batches before it have been divided by the released number: their gradients and
losses are multiplied by the quotient of both numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

import rlhf_patches

from .. import _released
from . import _window

_NAME = "trl-gkd-generated-count"


@dataclasses.dataclass
class _Window:
    """What the micro-batches of a window had so far."""

    count: Any = 0
    generated: bool = False
    micro_batches: int = 0
    losses: Any = 0.0
    divisor: torch.Tensor | None = None


_windows = WeakTensorKeyDictionary()
"""By the released number of tokens, while it is alive: one tensor for all micro-batches of a window."""
_generated = WeakTensorKeyDictionary()
"""The labels of generated completions, while they are alive."""


def generated(labels: Any) -> Any:
    """The labels of a generated micro-batch, noted as such."""
    if isinstance(labels, torch.Tensor):
        _generated[labels] = True
    return labels


def divisor(items: Any) -> Any:
    """What divides a micro-batch's divergence: the trained tokens if they are known, else the released number."""
    window = _windows.get(items) if isinstance(items, torch.Tensor) else None
    return items if window is None or window.divisor is None else window.divisor


def step(trainer: Any, training_step: Callable[..., Any], model: Any, inputs: Any, items: Any) -> Any:
    """In place of ``training_step(model, inputs, items)``, whose loss is divided by ``items``.

    Args:
        trainer: GKD's.
        training_step: that of its base class.
        model: the model, with its wrappers.
        inputs: a micro-batch, of the data set or generated.
        items: the tokens of the data set in the window, of all ranks with ``average_tokens_across_devices``.
    """
    if items is None or not (trainer.lmbda > 0 or trainer.seq_kd):
        return training_step(model, inputs, items)
    if _counts_otherwise(trainer, items) or _is_kept_by_an_engine(trainer):
        return training_step(model, inputs, items)
    window = _noted(inputs["labels"], items)
    if not trainer.accelerator.sync_gradients:
        loss = training_step(model, inputs, items)
        window.losses = window.losses + loss
        return loss
    return _last(trainer, training_step, model, inputs, items, window)


def divisor_of_a_buffer(trainer: Any, inputs: Any, items: Any) -> Any:
    """The same in GOLD, which has filled a buffer with the window's micro-batches.

    Args:
        trainer: GOLD's.
        inputs: a micro-batch of the buffer.
        items: the tokens of the data set in the window, as often as the loader repeats them.
    """
    if not isinstance(items, torch.Tensor):
        return items
    window = _windows.get(items)
    if window is None:
        _windows[items] = window = _Window()
        window.divisor = _of_a_buffer(trainer, inputs, items)
    return items if window.divisor is None else window.divisor


def _of_a_buffer(trainer: Any, inputs: Any, items: torch.Tensor) -> torch.Tensor | None:
    """The trained tokens, as often as the released number counts each; None if the window stays as released."""
    if not any(trainer._buffered_on_policy or ()):
        rlhf_patches.decided(_NAME, False)
        return None
    if _counts_otherwise(trainer, items):
        return None
    batches = trainer._buffered_inputs or []
    labels = [batch.get("labels") if isinstance(batch, dict) else None for batch in batches]
    other = _window.replaced(trainer, trainer.generalized_jsd_loss, *_window.LOADING)
    is_known = not other and any(inputs is each for each in batches) and all(each is not None for each in labels)
    if is_known:
        rlhf_patches.decided(_NAME, True)
    if other:
        _released.left(_NAME, other)
    counts = [(each[:, 1:] != -100).sum() for each in labels if each is not None]
    count = torch.stack(counts).sum().to(items.device) if counts else items.new_zeros(())
    known, unknown_to = _of_all_ranks(trainer, count, int(not is_known))
    trained = known.clamp(min=1) * trainer.args.gradient_accumulation_steps
    return torch.where(unknown_to > 0, items, trained.to(items.dtype))


def _of_all_ranks(trainer: Any, count: torch.Tensor, *flags: int) -> Any:
    """The sums over ranks, if their tokens count together; each rank takes part, whatever it knows of its own code."""
    mine = torch.stack([count, *map(count.new_tensor, flags)])
    if _adds_up(trainer):
        mine = trainer.accelerator.gather(mine).view(-1, len(mine)).sum(0)
    return mine.unbind()


def _adds_up(trainer: Any) -> bool:
    """Whether the released number is that of several ranks."""
    return bool(trainer.args.average_tokens_across_devices) and int(trainer.accelerator.num_processes) > 1


def _counts_otherwise(trainer: Any, items: Any) -> bool:
    """Whether a number has other rules than here, which all ranks answer alike."""
    accelerator = trainer.accelerator
    return (
        not isinstance(items, torch.Tensor)
        or items.dim() > 0  # a number for each GPU of DataParallel
        or getattr(accelerator, "parallelism_config", None) is not None
        or (trainer.args.average_tokens_across_devices and _window.averaged_over(trainer) != accelerator.num_processes)
        or bool(getattr(trainer, "use_liger_gkd_loss", False))
    )


def _is_kept_by_an_engine(trainer: Any) -> bool:
    """Whether the gradients of earlier micro-batches are not in the parameters, which all ranks answer alike."""
    engine = trainer.accelerator.distributed_type.value
    is_ddp = engine.startswith("MULTI_")  # known: accelerate's names of DDP, by the kind of device
    if engine == "NO" or is_ddp or _window.micro_batches_of(trainer) == 1:
        return False
    _released.stays(_NAME, f"{engine} keeps the gradients of earlier micro-batches itself", "the gradient")
    return True


def _noted(labels: torch.Tensor, items: torch.Tensor) -> _Window:
    """The window of a released number, with this micro-batch's tokens."""
    window: _Window | None = _windows.get(items)
    if window is None:
        _windows[items] = window = _Window()
    window.count = window.count + (labels[:, 1:] != -100).sum()
    window.generated = window.generated or labels in _generated
    window.micro_batches += 1
    return window


def _last(
    trainer: Any, training_step: Callable[..., Any], model: Any, inputs: Any, items: torch.Tensor, window: _Window
) -> Any:
    """The last micro-batch of a window: it, and those before it, are divided by the tokens that the window trains."""
    other = _window.replaced(trainer, trainer.generalized_jsd_loss)
    is_known = not other and window.micro_batches == _window.micro_batches_of(trainer)
    if is_known or not window.generated:
        rlhf_patches.decided(_NAME, window.generated)
    if other and window.generated:
        _released.left(_NAME, other)
    if not (window.generated and is_known) and not _adds_up(trainer):
        return training_step(model, inputs, items)
    flags = int(window.generated), int(not is_known)
    count, generated_by, unknown_to = _of_all_ranks(trainer, window.count.to(items.device), *flags)
    some = (generated_by > 0) & (unknown_to == 0)
    window.divisor = torch.where(some, count.clamp(min=1).to(items.dtype), items)
    if window.micro_batches == 1:
        return training_step(model, inputs, items)
    factor = items / window.divisor
    for parameter in model.parameters():
        if parameter.grad is not None:
            # writes: the gradient of the micro-batches before, which were divided by the released number
            parameter.grad.mul_(factor.to(parameter.grad.device))
    loss = training_step(model, inputs, items)
    return torch.where(factor == 1, loss, loss + window.losses * (factor - 1))
