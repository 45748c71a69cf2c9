"""Dr.GRPO's divisor where verl's configuration names none: what its worker calls."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

_MODE = "seq-mean-token-sum-norm"


def with_divisor(actor: Any, config: Any) -> Any:
    """The actor's configuration, with ``rollout.response_length`` where its mode wants a divisor and has none.

    Args:
        actor: the configuration as verl has just made it, fields frozen; it stays as it is.
        config: the worker's, of which that is a part.
    """
    if getattr(actor, "loss_agg_mode", None) != _MODE or getattr(actor, "loss_scale_factor", _MODE) is not None:
        return actor
    try:
        length = config.rollout.get("response_length")
    except Exception:  # whatever a configuration of somebody's own does: verl reads no length here, so it cannot fail
        return actor
    if not dataclasses.is_dataclass(actor) or not isinstance(length, int) or length < 1:
        return actor
    ours = copy.copy(actor)
    vars(ours)["loss_scale_factor"] = length
    return ours
