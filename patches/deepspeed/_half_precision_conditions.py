"""In which calls the bugs of 16 bits without ZeRO occur."""

from __future__ import annotations

from typing import Any

from . import _of_half_precision


def divides_unscaled(self: Any) -> float | bool | None:
    """The factor of an engine's gradients, which its step divides by a scale; None if a user's code may multiply."""
    scale = _of_half_precision.scale(self)
    return None if scale is None else False if scale == 1.0 else 1 / scale


def keeps_gradients(self: Any) -> bool:
    """Whether an engine does not clear gradients after a step."""
    return bool(
        self.bfloat16_enabled() and not self.zero_optimization() and _of_half_precision.is_released(self.optimizer)
    )
