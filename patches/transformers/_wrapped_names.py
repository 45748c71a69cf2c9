"""The name of a model's class within its wrappers."""

from __future__ import annotations

from typing import Any

from .. import _released
from . import _known_loss


def name_for(trainer: Any, model: Any) -> str:
    """The name of `name_within`; empty if code of the user's may shift the labels itself."""
    smoother = trainer.label_smoother
    theirs = _known_loss.author(trainer.compute_loss) in ("transformers", "trl")
    if theirs and _known_loss.author(type(smoother).__call__) == "transformers":
        return name_within(model)
    own = type(smoother).__qualname__ if theirs else f"{type(trainer).__name__}.compute_loss"
    _released.stays("transformers-smoothed-labels", f"{own} is not transformers' own", "the smoothed loss")
    return ""


def name_within(model: Any) -> str:
    """The name of a model's class before it was compiled, wrapped, or converted by FSDP2 or PEFT."""
    inner = _known_loss.unwrapped(model)
    # known: FSDP2 gives the model a class of torch's that inherits from its own
    return next((each.__name__ for each in type(inner).__mro__ if each.__module__.partition(".")[0] != "torch"), "")
