"""The loss of a mixture of experts under data parallelism: the router's part once."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
import transformers
from packaging.version import Version

import rlhf_patches

from ._known_loss import MODELS, author_of_forward, unwrapped

_ON_THE_MODEL = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")  # one: a mixture's, JetMoE's, DBRX's


def multiplied(
    trainer: Any, model: Any, outputs: Any, loss: Any, factor: int, labels: Any, num_items_in_batch: Any
) -> Any:
    """The loss of ``Trainer.compute_loss`` times the number of data-parallel ranks, but for the router's part.

    Args:
        trainer: whose loss it is.
        model: what was called.
        outputs: what it returned; their loss is the same tensor, and is multiplied with it.
        loss: before the multiplication.
        factor: the number.
        labels: those that the trainer has kept from the model, to compute the loss itself; else None.
        num_items_in_batch: what the loss was divided by; None where it was not.
    """
    loss *= factor
    auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
    if isinstance(auxiliary, torch.Tensor) and factor != 1:  # 0 where no router has said anything
        is_the_models = labels is None and trainer.compute_loss_func is None
        if is_the_models and num_items_in_batch is not None and _is_over_ranks(trainer):
            coefficient = _coefficient(model)
            if coefficient:
                rlhf_patches.decided("transformers-moe-aux-loss", float(factor))
                loss -= (factor - 1) * coefficient * auxiliary.to(loss.device)
    return loss


def _is_over_ranks(trainer: Any) -> bool:
    """Whether the factor is the number of data-parallel ranks: neither under DataParallel nor sequence parallelism."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return trainer.args.n_gpu <= 1 and not getattr(parallelism, "sp_enabled", False)


def _coefficient(model: Any) -> float | None:
    """What a mixture's forward multiplies ``aux_loss`` with; None for all else, and for a forward that is not known."""
    model = unwrapped(model)
    author = author_of_forward(model)
    if author not in MODELS:
        return None
    found = None
    if author != "trl" or Version(transformers.__version__) < Version("5.0.0"):  # as TRL's chunked forward asks
        found = next((getattr(model, name) for name in _ON_THE_MODEL if hasattr(model, name)), None)
    if found is None:
        config = getattr(model, "config", None)
        found = getattr(getattr(config, "text_config", None) or config, "router_aux_loss_coef", None)
    return float(found) if isinstance(found, Real) else None
