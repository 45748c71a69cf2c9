"""Dr.GRPO's divisor where verl's configuration sets none, for verl's worker."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

_MODE = "seq-mean-token-sum-norm"


def with_divisor(actor: Any, config: Any) -> Any:
    """The actor's configuration, with ``rollout.response_length`` where its mode needs a divisor and none is set.

    Args:
        actor: the configuration that verl has just created, with frozen fields; not modified.
        config: the worker's configuration, which contains ``actor``.
    """
    if getattr(actor, "loss_agg_mode", None) != _MODE or getattr(actor, "loss_scale_factor", _MODE) is not None:
        return actor
    try:
        length = config.rollout.get("response_length")
    except Exception:  # a custom configuration may raise anything: verl reads no length here, so it does not fail
        return actor
    if not dataclasses.is_dataclass(actor) or not isinstance(length, int) or length < 1:
        return actor
    ours = copy.copy(actor)
    vars(ours)["loss_scale_factor"] = length
    return ours
