"""Whether the functions that compute and attach a router's losses are Megatron's own: a user's may have the repair."""

from __future__ import annotations

import sys
from typing import Any

from .. import _released

_MEGATRON = ("megatron",)
_ROUTER = "megatron.core.transformer.moe.router"
_ATTACHING = ("forward", "backward", "set_loss_scale")


def replaced(*names: str, scaler: Any = None) -> str:
    """The first of these that is a user's; empty if none is.

    Args:
        names: functions of the router's module; one that it does not have, as in another release, does not count.
        scaler: the class that attaches losses; by default the one in the router's module.
    """
    module = sys.modules.get(_ROUTER)
    for name in names:
        found = getattr(module, name, None)
        if found is not None and not _released.is_released(found, _MEGATRON):
            return name
    scaler = scaler or getattr(module, "MoEAuxLossAutoScaler", None)
    # known: only a class of Megatron's own has this module name, and it inherits torch's `apply`
    own = str(getattr(scaler, "__module__", "")).startswith("megatron.") and "apply" not in vars(scaler)
    if own and all(_released.is_released(getattr(scaler, name), _MEGATRON) for name in _ATTACHING):
        return ""
    return "MoEAuxLossAutoScaler"
