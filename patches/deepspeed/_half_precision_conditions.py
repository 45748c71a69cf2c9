"""In which calls the bugs of 16 bits without ZeRO occur."""

from __future__ import annotations

from typing import Any

from . import _of_half_precision


def divides_unscaled(self: Any) -> float | bool | None:
    """The factor of an engine's gradients, which its step divides by a scale; None if a user's code may multiply."""
    scale = _of_half_precision.scale(self)
    return None if scale is None else False if scale == 1.0 else 1 / scale


def keeps_gradients(self: Any) -> bool:
    """Whether neither an engine nor its optimizer clears gradients after a step. Whether its caller does is unknown."""
    optimizer = self.optimizer
    if not self.bfloat16_enabled() or self.zero_optimization() or not _of_half_precision.is_released(optimizer):
        return False
    return not _of_half_precision.clears_its_own(optimizer)
