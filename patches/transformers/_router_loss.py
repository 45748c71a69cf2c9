"""The loss of a mixture of experts under data parallelism: counts the router's part once."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
import transformers
from packaging.version import Version

import rlhf_patches

from ._known_loss import MODELS, author_of_forward, unwrapped

_ON_THE_MODEL = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")  # names in mixtures, JetMoE and DBRX


def multiplied(
    trainer: Any, model: Any, outputs: Any, loss: Any, factor: int, labels: Any, num_items_in_batch: Any
) -> Any:
    """The loss of ``Trainer.compute_loss`` times the number of data-parallel ranks, except the router's part.

    Args:
        trainer: the trainer.
        model: the called model.
        outputs: the model's outputs; their loss is the same tensor, and is multiplied with it.
        loss: before the multiplication.
        factor: the number of data-parallel ranks.
        labels: the labels that the trainer has withheld from the model, to compute the loss itself; otherwise
            None.
        num_items_in_batch: the divisor of the loss; None without one.
    """
    loss *= factor
    auxiliary = outputs.get("aux_loss") if isinstance(outputs, dict) else None
    if isinstance(auxiliary, torch.Tensor) and factor != 1:  # 0 if there are no router logits
        is_the_models = labels is None and trainer.compute_loss_func is None
        if is_the_models and num_items_in_batch is not None and _is_over_ranks(trainer):
            coefficient = _coefficient(model)
            if coefficient:
                rlhf_patches.decided("transformers-moe-aux-loss", float(factor))
                loss -= (factor - 1) * coefficient * auxiliary.to(loss.device)
    return loss


def _is_over_ranks(trainer: Any) -> bool:
    """Whether the factor is the number of data-parallel ranks: not under DataParallel or sequence parallelism."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return trainer.args.n_gpu <= 1 and not getattr(parallelism, "sp_enabled", False)


def _coefficient(model: Any) -> float | None:
    """The factor of ``aux_loss`` in a mixture's forward; None for other models, and for an unknown forward."""
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
