"""Where TRL has its class of a causal language model with a value head."""

from __future__ import annotations

from typing import Any


def value_head_class() -> Any:
    """``trl``'s, as the released lines ask, or ``trl.experimental.ppo``'s where that has none.

    These releases of TRL have none in ``trl``: what is there was put there, by somebody who has met the bug.

    Raises:
        ImportError: it is in neither.
    """
    try:
        from trl import AutoModelForCausalLMWithValueHead
    except ImportError as error:
        try:
            from trl.experimental.ppo import AutoModelForCausalLMWithValueHead
        except ImportError:
            raise error from None
    return AutoModelForCausalLMWithValueHead


def has_value_head_class() -> bool:
    """Whether TRL has it at all."""
    try:
        value_head_class()
    except ImportError:
        return False
    return True
