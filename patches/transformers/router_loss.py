"""The loss of a mixture of experts under data parallelism: the router's part once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch

from rlhf_patches import matched

_TARGET = "transformers.trainer:Trainer.compute_loss"
_BEFORE_5 = ("76812cdcda974fc8", "c0d76af0b927754e", "96d0e70b39349c32", "7c89bdefea484566")
_COUNTS_BY_PLAN = ("a7d0eb52001f9676", "3aef336ac08185dc")  # tensor-parallel ranks: as accelerate's plan says
_COUNTS_BY_MODEL = ("84cf1eef0beeae91",)  # as the model says
_MODELS = ("transformers", "liger_kernel", "trl")
_WRAPPERS = ("torch", "torch_xla", "deepspeed", "peft")
_WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model", "model")
_ON_THE_MODEL = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")  # one: a mixture's, JetMoE's, DBRX's


def once(wrapped: Callable[..., Any], trainer: Any, args: Any, kwargs: Any) -> Any:
    """Around ``Trainer.compute_loss``, whose result is multiplied by the number of data-parallel ranks."""

    def given(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return return_outputs, {"model": model, "inputs": inputs, "num_items_in_batch": num_items_in_batch}

    return_outputs, named = given(*args, **kwargs)
    coefficient = _coefficient(named["model"])
    if not coefficient or not _is_multiplied(trainer, **named) or (ranks := _ranks(trainer)) == 1:
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


def _coefficient(model: Any) -> float | None:
    """What a mixture's forward multiplies ``aux_loss`` with; None for all else, and for a forward that is not known."""
    model = _unwrapped(model)
    author = _author(model)
    if author not in _MODELS:
        return None
    found = None
    if author != "trl" or _shape() in _BEFORE_5:  # TRL's chunked forward asks the configuration since
        found = next((getattr(model, name) for name in _ON_THE_MODEL if hasattr(model, name)), None)
    if found is None:
        config = getattr(model, "config", None)
        found = getattr(getattr(config, "text_config", None) or config, "router_aux_loss_coef", None)
    return float(found) if isinstance(found, Real) else None


def _unwrapped(model: Any) -> Any:
    """The model within wrappers. Only read: accelerate's ``unwrap_model`` assigns to a compiled model."""
    while _author(model) in _WRAPPERS:
        children = dict(model.named_children())
        inner = next((children[name] for name in _WRAPPED if name in children), None)
        if inner is None:
            break
        model = inner
    return model


def _author(model: Any) -> str:
    """The package that has the model's forward, around which accelerate puts mixed precision."""
    forward: Any = getattr(model, "forward", None)
    return str(getattr(inspect.unwrap(forward), "__module__", "")).partition(".")[0]
