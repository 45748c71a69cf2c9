"""Losses of GKD, GOLD, Online DPO's family and GRPO, scaled for a Trainer that sums micro-batches and averages ranks.

This module adds no collective, since transformers has gathered the number of tokens already. If a loss is right, a
function returns the trainer's own function, or the loss itself. It does so too if a method that computes, counts or
passes on the loss is not TRL's or transformers', because that method may be right already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _hooks, _released

COUNTED = ("dapo", "cispo", "vespo")
"""GRPO's losses that are divided by the tokens of a generation."""
_METHODS = ("compute_loss", "training_step", "get_batch_samples", "_get_num_items_in_batch")
LOADING = ("get_train_dataloader", "_get_train_sampler")
"""The methods that yield a step's batch once per micro-batch of the step."""
_AFTER_THE_LOSS = ("_inner_training_loop", "_run_epoch", "_clip_grad_norm")
"""The methods of ``Trainer`` in which the gradients are complete, in one release or another."""
_HOOKING = (
    *("trl", "transformers", "accelerate", "torch", "deepspeed", "peft"),
    *("liger_kernel", "bitsandbytes", "torchao", "rlhf_patches", "wandb"),
)
"""Packages whose hooks of gradients do not change their size."""
_OF_GRPO = (
    *("training_step", "compute_loss", "_compute_loss"),
    *("_prepare_inputs", "_generate_and_score_completions", "_generate"),
)
"""GRPO's methods that count the tokens, pass the count on, or use it."""


def summed(trainer: Any, loss_of: Callable[..., Any], items: Any, counted: int = 1) -> Callable[..., Any]:
    """A function for a sum over a micro-batch's tokens that is divided by ``num_items_in_batch``.

    Args:
        trainer: GKD's or GOLD's.
        loss_of: the function that computes the quotient.
        items: the number of tokens of a window, on all ranks with ``average_tokens_across_devices``; None if the
            loss is a mean over its own tokens.
        counted: how often that number counts each token of the window.
    """
    if items is None or not trainer.model.training:
        return loss_of
    times = counted * averaged_over(trainer)
    if times == 1 or _is_left(trainer, loss_of, *(LOADING if counted > 1 else ())):
        return loss_of
    return lambda *args, **kwargs: loss_of(*args, **kwargs) * times


def averaged(trainer: Any, loss_of: Callable[..., Any], items: Any) -> Callable[..., Any]:
    """A function for a mean over a micro-batch; `Trainer.training_step` assumes that it is divided by ``items``."""
    if items is None or not trainer.model.training:
        return loss_of
    steps = micro_batches_of_a_mean(trainer)
    if steps == 1 or _is_left(trainer, loss_of):
        return loss_of
    return lambda *args, **kwargs: loss_of(*args, **kwargs) / steps


def divided(trainer: Any, loss: Any) -> Any:
    """A micro-batch's mean, which the trainer's own `training_step` passes undivided to `accelerator.backward`."""
    steps = undivided(trainer)
    if steps == 1:
        return loss
    if other := replaced_step(trainer):
        _released.left("trl-online-dpo-accumulation", other)
        return loss
    return loss / steps


def part_of_a_generation(trainer: Any) -> float:
    """The share of a generation's micro-batches in GRPO's optimizer step; 1 if other code may handle it already."""
    of_a_generation = trainer.args.steps_per_generation
    # Outside train() the attribute is missing, and upstream does not read it.
    part = getattr(trainer, "current_gradient_accumulation_steps", of_a_generation) / of_a_generation
    if part != 1 and (other := replaced_in_grpo(trainer)):
        _released.left("trl-grpo-dapo-scale", other)
        return 1.0
    return float(part)


def trained_tokens(trainer: Any, generated: Any, kept: Any) -> Any:
    """The number of tokens that divides GRPO's loss: ``kept``, or ``generated`` if other code may be right already.

    Every rank computes both numbers, so that all ranks take part in the gathers.
    """
    if trainer.loss_type in COUNTED and (other := replaced_in_grpo(trainer)):
        _released.left("trl-grpo-truncated-count", other)
        return generated
    return kept


def replaced_in_grpo(trainer: Any) -> str:
    """The part of GRPO's step that is not the releases' own, and may be right; empty if none."""
    return _released.others(trainer, *_OF_GRPO) or after_the_loss(trainer)


def undivided(trainer: Any) -> int:
    """The number of micro-batches by which nothing divides the loss that Online DPO's family passes to `backward`."""
    accelerator = trainer.accelerator
    if accelerator.distributed_type == "DEEPSPEED" or accelerator.gradient_accumulation_steps > 1:
        return 1  # DeepSpeed's engine or accelerate divides
    return micro_batches_of(trainer)


def replaced_step(trainer: Any) -> str:
    """The part of a step of Online DPO's family that is not the release's own, and may divide; empty if none."""
    return _released.others(trainer, "training_step", "_compute_losses") or after_the_loss(trainer)


def replaced(trainer: Any, loss_of: Callable[..., Any], *more: str) -> str:
    """The part of GKD's or GOLD's step that is not the releases' own, and may be right; empty if none."""
    own = "" if _released.is_released(loss_of) else getattr(loss_of, "__qualname__", type(loss_of).__qualname__)
    return _released.others(trainer, *_METHODS, *more) or own or after_the_loss(trainer)


def after_the_loss(trainer: Any) -> str:
    """What changes the gradients after the loss and is not the releases' own; empty if nothing does."""
    own = _released.others(trainer.accelerator, "backward", "clip_grad_norm_")
    return own or _released.others(trainer, *_AFTER_THE_LOSS) or _hook(getattr(trainer, "model", None))


def _hook(model: Any) -> str:
    for hook in _hooks.of(*model.parameters()) if hasattr(model, "parameters") else ():
        if not _released.is_released(hook, _HOOKING):
            return f"the hook {getattr(hook, '__qualname__', type(hook).__qualname__)} of a parameter"
    return ""


def _is_left(trainer: Any, loss_of: Callable[..., Any], *more: str) -> bool:
    if other := replaced(trainer, loss_of, *more):
        _released.left("trl-distillation-scale", other)
    return bool(other)


def micro_batches_of(trainer: Any) -> int:
    """The micro-batches of this window: the last of an epoch may have fewer.

    Outside train(), and in older transformers, the setting.
    """
    window = getattr(trainer, "current_gradient_accumulation_steps", None)
    return int(window or trainer.args.gradient_accumulation_steps)


def micro_batches_of_a_mean(trainer: Any) -> int:
    """The micro-batches of this window by which nothing divides a mean that `Trainer` takes for a sum."""
    return 1 if _is_divided_later(trainer) else micro_batches_of(trainer)


def averaged_over(trainer: Any) -> int:
    """The ranks with different tokens, which `num_items_in_batch` counts and whose gradients are averaged.

    The same as in `Trainer.compute_loss`.
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
