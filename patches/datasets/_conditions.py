"""In which calls the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

from typing import Any


def resumed(self: Any) -> bool | None:
    """Whether the shuffled examples begin at a loaded state.

    None if that cannot be told, and if the state has no example left: it may be that of an epoch's end, which is right.
    """
    try:
        if not self._state_dict or self._state_dict == self._original_state_dict:
            return False
        return None if _has_ended(self._state_dict) else True
    except AttributeError:
        return None


def _has_ended(state: dict[str, Any]) -> bool:
    """Whether all sources that examples are read from, within one another, are exhausted."""
    if ended := state.get("is_exhausted"):
        return all(ended)
    return isinstance(within := state.get("examples_iterable"), dict) and _has_ended(within)
