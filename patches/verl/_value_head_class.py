"""Locates TRL's class of a causal language model with a value head."""

from __future__ import annotations

from typing import Any


def value_head_class() -> Any:
    """The class from ``trl``, as the released lines import it, or else from ``trl.experimental.ppo``.

    These releases of TRL have no such class in ``trl``: if there is one, a user's workaround for the bug put it there.

    Raises:
        ImportError: neither module has the class.
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
    """Whether TRL has the class at all."""
    try:
        value_head_class()
    except ImportError:
        return False
    return True
