"""The name of a model's class within its wrappers."""

from __future__ import annotations

from typing import Any

from . import _known_loss


def name_within(model: Any) -> str:
    """The name of a model's class before it was compiled, wrapped, or converted by FSDP2 or PEFT."""
    inner = _known_loss.unwrapped(model)
    # known: FSDP2 gives the model a class of torch's that inherits from its own
    return next((each.__name__ for each in type(inner).__mro__ if each.__module__.partition(".")[0] != "torch"), "")
