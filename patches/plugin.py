"""The entry point of the built-in patches; the engine finds them as it finds those of a plugin."""

from __future__ import annotations

from rlhf_patches import Listed, Patch, hookimpl

from .catalogue import LISTED


@hookimpl(specname="rlhf_patches")
def listed() -> tuple[Listed, ...]:
    """Every built-in patch, each to be imported together with what it patches."""
    return LISTED


def rlhf_patches() -> list[Patch]:
    """Every built-in patch."""
    return [patch.load() for patch in LISTED]
