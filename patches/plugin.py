"""The built-in patches. The engine asks `listed`; of a plugin of another distribution it asks a pluggy hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .catalogue import LISTED

if TYPE_CHECKING:
    from rlhf_patches import Advice, Listed, Patch, Watch


def listed() -> tuple[Listed, ...]:
    """Every built-in patch and advice, each to be imported together with what it is for."""
    return LISTED


def rlhf_patches() -> list[Patch | Advice | Watch]:
    """Every built-in patch and advice."""
    return [each.load() for each in LISTED]
