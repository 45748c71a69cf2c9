"""The built-in patches. The engine calls `listed`; for plugins of other distributions it calls a pluggy hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .catalogue import LISTED

if TYPE_CHECKING:
    from rlhf_patches import Advice, Listed, Patch, Watch


def listed() -> tuple[Listed, ...]:
    """Every built-in patch and advice; each is imported together with the module that it is for."""
    return LISTED


def rlhf_patches() -> list[Patch | Advice | Watch]:
    """Every built-in patch and advice."""
    return [each.load() for each in LISTED]
