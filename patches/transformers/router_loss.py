"""The loss of a mixture of experts under data parallelism: the router's part once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from rlhf_patches import matched

_TARGET = "transformers.trainer:Trainer.compute_loss"
_BEFORE_5 = ("76812cdcda974fc8", "c0d76af0b927754e", "96d0e70b39349c32", "7c89bdefea484566")
_COUNTS_BY_PLAN = ("a7d0eb52001f9676", "3aef336ac08185dc")  # tensor-parallel ranks: as accelerate's plan says
_COUNTS_BY_MODEL = ("84cf1eef0beeae91",)  # as the model says


def once(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
    """Around ``Trainer.compute_loss``, whose result is multiplied by the number of data-parallel ranks."""

    def given(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return return_outputs, {"model": model, "inputs": inputs, "num_items_in_batch": num_items_in_batch}

    return_outputs, named = given(*args, **kwargs)
    ranks = _ranks(trainer)
    coefficient = _coefficient(trainer) if ranks > 1 and _is_multiplied(trainer, **named) else None
    if coefficient is None:
        return wrapped(*args, **kwargs)
    loss, outputs = wrapped(**named, return_outputs=True)
    auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
    if isinstance(auxiliary, torch.Tensor):  # 0 where no router has said anything
        loss -= (ranks - 1) * coefficient * auxiliary.to(loss.device)  # in place, as the multiplication: outputs has it
    return (loss, outputs) if return_outputs else loss


def _is_multiplied(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any) -> bool:
    """Whether the model's own loss is: neither one that somebody else computes, nor under sequence parallelism."""
    of_others = trainer.compute_loss_func is not None or (trainer.label_smoother is not None and "labels" in inputs)
    return (
        num_items_in_batch is not None
        and bool(trainer.args.average_tokens_across_devices)
        and bool(trainer.model_accepts_loss_kwargs)
        and trainer.args.n_gpu <= 1
        and not of_others
        and not getattr(_parallelism(trainer), "sp_enabled", False)
    )


def _shape() -> str:
    """Which compute_loss this is."""
    return matched("transformers-moe-aux-loss", _TARGET)


def _ranks(trainer: Any) -> int:
    """By how much it is multiplied."""
    ranks = int(trainer.accelerator.num_processes)
    if _shape() in _COUNTS_BY_PLAN:
        return ranks // int(getattr(_parallelism(trainer), "tp_size", 1))
    return ranks // int(trainer.get_tp_size()) if _shape() in _COUNTS_BY_MODEL else ranks


def _parallelism(trainer: Any) -> Any:
    return getattr(trainer.accelerator, "parallelism_config", None)


def _coefficient(trainer: Any) -> float | None:
    """What the model's forward multiplies ``aux_loss`` with; None for a forward that is not known."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    forward = inspect.unwrap(model.forward)  # accelerate puts mixed precision around it
    author = getattr(forward, "__module__", "").partition(".")[0]
    if author not in ("transformers", "liger_kernel", "trl"):
        return None
    found = None
    if author != "trl" or _shape() in _BEFORE_5:  # TRL's chunked forward asks the configuration since
        # One of them, or none: a mixture's, JetMoE's, DBRX's.
        names = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
        found = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if found is None:
        found = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    return None if found is None else float(found)
