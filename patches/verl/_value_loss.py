"""Averages verl's value loss over the global mini-batch."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

import rlhf_patches

from .. import _released
from . import _conditions

_NAME = "verl-critic-loss-scale"

_of_this_loss: ContextVar[_Loss | None] = ContextVar("rlhf_patches_value_loss", default=None)


class _Loss:
    """The value loss of one micro-batch: the numbers from verl's engines, and the micro-batch's own average."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.average: torch.Tensor | None = None

    def number(self, name: str) -> Any:
        """A number that an engine or its trainer stored in the data; None if it is missing."""
        try:
            return self._data[name]
        except KeyError:
            return None

    def has_all(self) -> bool:
        """Whether ``ppo_loss`` could be computed from these data."""
        return all(self.number(name) is not None for name in ("dp_size", "batch_num_tokens", "global_batch_size"))


def aggregated(agg_loss: Callable[..., torch.Tensor], *, loss_agg_mode: str, **arguments: Any) -> torch.Tensor:
    """verl's ``agg_loss``; within `value_loss`, this micro-batch's part of the average over the global mini-batch.

    As released where the old critics call ``compute_value_loss``, and where the number that the mode needs is missing.
    """
    loss = _of_this_loss.get()
    if loss is None:
        return agg_loss(loss_agg_mode=loss_agg_mode, **arguments)
    needed = ("dp_size", "batch_num_tokens" if loss_agg_mode == "token-mean" else "global_batch_size")
    numbers = {name: loss.number(name) for name in needed}
    if any(number is None for number in numbers.values()):
        return agg_loss(loss_agg_mode=loss_agg_mode, **arguments)
    with torch.no_grad():
        loss.average = agg_loss(loss_agg_mode=loss_agg_mode, **arguments)
    return agg_loss(loss_agg_mode=loss_agg_mode, **arguments, **numbers)


def value_loss(wrapped: Callable[..., Any], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``value_loss`` with the data that `aggregated` needs, and a summed metric where ``ppo_loss`` has such metrics.

    ``ppo_loss`` reads all the numbers. A trainer that does not set all of them cannot use ``ppo_loss``'s metrics, and
    may expect a plain number: there the metric stays the micro-batch's own average.
    """
    config, _, data, _ = args
    if not _conditions.is_called_by_an_engine():
        _released.left(_NAME, "the caller of value_loss")
        return wrapped(*args, **kwargs)
    of_this = _Loss(data)
    token = _of_this_loss.set(of_this)
    try:
        loss, metrics = wrapped(*args, **kwargs)
    finally:
        _of_this_loss.reset(token)
    if of_this.average is None:
        return loss, metrics
    verls = importlib.import_module("verl.utils.metric")
    metric: Any = 0.5 * of_this.average.item()
    if _conditions.critic_micro_batches(config, data) is None:
        rlhf_patches.decided(_NAME, not _is_rounding(metric, metrics, loss.dtype))
    if hasattr(verls, "Metric") and of_this.has_all():
        metric = verls.Metric(value=loss, aggregation=verls.AggregationType.SUM)
    return loss, {**metrics, "critic/vf_loss": metric}


def _is_rounding(average: float, metrics: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the released loss is the repaired one, which verl has read for its metrics, up to their rounding."""
    return math.isclose(average, metrics["critic/vf_loss"], rel_tol=4 * torch.finfo(dtype).eps)
