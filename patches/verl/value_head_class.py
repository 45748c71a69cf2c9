"""Where TRL has its class of a causal language model with a value head."""

from __future__ import annotations

from typing import Any


def value_head_class() -> Any:
    """``trl.experimental.ppo``'s, or ``trl``'s where that has none: in this order, as verl 0.9.1 asks.

    Raises:
        ImportError: it is in neither.
    """
    try:
        from trl.experimental.ppo import AutoModelForCausalLMWithValueHead
    except ImportError:
        from trl import AutoModelForCausalLMWithValueHead
    return AutoModelForCausalLMWithValueHead


def has_value_head_class() -> bool:
    """Whether TRL has it at all."""
    try:
        value_head_class()
    except ImportError:
        return False
    return True
