"""Losses as a Trainer has to be given them, which adds up micro-batches and averages over ranks: GKD's, GOLD's, and
those of OnlineDPO's family.

Only arithmetic: nothing is gathered, since transformers has gathered the number of tokens already. Where a loss is
right, the trainer's own function, or the loss itself, is handed back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_COUNTING = ("get_batch_samples", "_get_num_items_in_batch")


def summed(trainer: Any, loss_of: Callable[..., Any], items: Any, counted: int = 1) -> Callable[..., Any]:
    """A function for a sum over a micro-batch's tokens that is divided by ``num_items_in_batch``.

    Args:
        trainer: GKD's or GOLD's.
        loss_of: what computes the quotient.
        items: the number of tokens of a window, on all ranks with ``average_tokens_across_devices``; or None, with
            which the loss is a mean over its own tokens.
        counted: how often each token of the window is in that number.
    """
    if items is None or not trainer.model.training or not _counted_by_transformers(trainer):
        return loss_of
    times = counted * _averaged_over(trainer)
    return loss_of if times == 1 else lambda *args, **kwargs: loss_of(*args, **kwargs) * times


def averaged(trainer: Any, loss_of: Callable[..., Any], items: Any) -> Callable[..., Any]:
    """A function for a mean over a micro-batch, which `Trainer.training_step` takes to be divided by ``items``."""
    if items is None or not trainer.model.training or _is_divided_later(trainer):
        return loss_of
    steps = _steps(trainer)
    return loss_of if steps == 1 else lambda *args, **kwargs: loss_of(*args, **kwargs) / steps


def divided(trainer: Any, loss: Any) -> Any:
    """A micro-batch's mean, which a `training_step` of the trainer's own hands to `accelerator.backward` as it is."""
    accelerator = trainer.accelerator
    if accelerator.distributed_type == "DEEPSPEED" or accelerator.gradient_accumulation_steps > 1:
        return loss  # DeepSpeed's engine divides, or accelerate
    steps = _steps(trainer)
    return loss if steps == 1 else loss / steps


def _steps(trainer: Any) -> int:
    """Of this window: the last of an epoch may have fewer. Outside train(), and in older transformers, the setting."""
    window = getattr(trainer, "current_gradient_accumulation_steps", None)
    return int(window or trainer.args.gradient_accumulation_steps)


def _counted_by_transformers(trainer: Any) -> bool:
    """Whether nobody has put another count in place of transformers' own, which may be right already."""
    methods = (getattr(type(trainer), name, None) for name in _COUNTING)
    return all(getattr(method, "__module__", "transformers.trainer") == "transformers.trainer" for method in methods)


def _averaged_over(trainer: Any) -> int:
    """The ranks that have different tokens, all of which the number counts: their gradients are averaged.

    As in `Trainer.compute_loss`.
    """
    if not trainer.args.average_tokens_across_devices:
        return 1
    same = trainer.get_tp_size() if hasattr(trainer, "get_tp_size") else 1
    return max(1, int(trainer.accelerator.num_processes) // max(1, int(same)))


def _is_divided_later(trainer: Any) -> bool:
    """Whether the step, or the Accelerator in transformers 5.2.0 to 5.5.3, divides by the number of micro-batches."""
    accelerator = trainer.accelerator
    return getattr(trainer, "loss_is_scaled_for_ga", None) is False or (
        accelerator.distributed_type != "DEEPSPEED" and accelerator.gradient_accumulation_steps > 1
    )
