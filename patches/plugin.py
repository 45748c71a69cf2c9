"""The entry point of the built-in patches; the engine finds them as it finds those of a plugin."""

from __future__ import annotations

from rlhf_patches import Advice, Listed, Patch, hookimpl

from .catalogue import LISTED


@hookimpl(specname="rlhf_patches")
def listed() -> tuple[Listed, ...]:
    """Every built-in patch and advice, each to be imported together with what it is for."""
    return LISTED


def rlhf_patches() -> list[Patch | Advice]:
    """Every built-in patch and advice."""
    return [each.load() for each in LISTED]
