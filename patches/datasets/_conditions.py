"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def resumed(self: Any) -> bool | None:
    """Whether the shuffled examples begin at a loaded state; None if that cannot be told."""
    try:
        return bool(self._state_dict) and self._state_dict != self._original_state_dict
    except AttributeError:
        return None
