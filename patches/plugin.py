"""The entry point of the built-in patches; the engine finds them as it finds those of a plugin."""

from __future__ import annotations

from rlhf_patches import Patch, hookimpl

from .catalogue import PATCHES


@hookimpl
def rlhf_patches() -> list[Patch]:
    """Every built-in patch."""
    return list(PATCHES)
