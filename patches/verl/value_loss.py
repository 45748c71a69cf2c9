"""verl's value loss, averaged over the global mini-batch: what its functions call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_of_this_loss: ContextVar[dict[str, Any] | None] = ContextVar("rlhf_patches_global_batch", default=None)


def global_batch() -> dict[str, Any]:
    """More arguments for ``agg_loss`` within `value_loss`; none where the old critics call ``compute_value_loss``."""
    return _of_this_loss.get() or {}


def value_loss(wrapped: Callable[..., Any], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``value_loss``: this micro-batch's part of the average over the global mini-batch, and a metric that is summed.

    verl's engines put the numbers into the data; ``ppo_loss`` reads them there, too.
    """
    _, _, data, _ = args
    token = _of_this_loss.set({name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")})
    try:
        loss, metrics = wrapped(*args, **kwargs)
    finally:
        _of_this_loss.reset(token)
    verls = importlib.import_module("verl.utils.metric")
    if not hasattr(verls, "Metric"):  # 0.7.0, which averages all metrics over micro-batches
        return loss, metrics
    return loss, {**metrics, "critic/vf_loss": verls.Metric(value=loss, aggregation=verls.AggregationType.SUM)}
