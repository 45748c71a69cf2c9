"""Dropout that a module of transformers applies by a function, with a probability in an attribute."""

from __future__ import annotations

import functools
from typing import Any

from .. import _released

# known here: in transformers' own modules a number of this name is a probability that its forward hands to dropout.
_NAMES = (
    *("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "residual_dropout", "embedding_dropout"),
    *("resid_pdrop", "attn_dropout_p", "attn_dropout", "attn_pdrop"),
)
_BY_CONFIG = [f"transformers.models.{name}" for name in ("blt", "falcon", "gpt_neo", "gptj", "persimmon", "prophetnet")]
"""The models whose modules read the probability from their config at each call."""
_PACKAGES = ("transformers", "accelerate", "torch")


def is_left_on(model: Any) -> bool | None:
    """Whether a model has such dropout; None if modules may read one from their config, or are a user's."""
    modules = list(model.modules())
    if any(map(_reads_a_dropout, modules)):
        return None
    if any(map(_names, modules)):
        return True
    return None if any(map(_unknown, modules)) else False


def disabled(module: Any) -> Any:
    """The module, without such dropout."""
    for name in _names(module):
        setattr(module, name, 0.0)  # writes: the user asks for a model without dropout
    return module


def _names(module: Any) -> list[str]:
    found = _above_zero(module)
    return found if found and not _is_by_config(module) and _is_theirs(module) else []


def _above_zero(module: Any) -> list[str]:
    return [name for name in _NAMES if isinstance(vars(module).get(name), float) and vars(module)[name] > 0]


def _unknown(module: Any) -> bool:
    return bool(_above_zero(module)) and not _is_by_config(module) and not _is_theirs(module)


def _reads_a_dropout(module: Any) -> bool:
    config = vars(module).get("config") if _is_by_config(module) else None
    given = getattr(config, "__dict__", {}).items()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in given)


def _is_by_config(module: Any) -> bool:
    # known: transformers' own packages, whose modules were read; a user's subclass is another module
    return ".".join(_released.written_in(module).split(".")[:3]) in _BY_CONFIG


def _is_theirs(module: Any) -> bool:
    forward = vars(module).get("forward", type(module).forward)
    while isinstance(forward, functools.partial):  # accelerate's, of a model on several devices
        forward = vars(forward).get("__wrapped__", forward.func)
    return _released.is_released(module, ("transformers",)) and _released.is_released(forward, _PACKAGES)
