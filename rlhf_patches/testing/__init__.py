"""Tests of a patch, under pytest: the contract of every patch, and temporary application of one patch.

    from rlhf_patches.testing import PatchContract
    from my_plugin import PATCH

    class TestContract(PatchContract):
        patch = PATCH

With rlhf-patches installed, pytest has the fixture ``apply_patch``: ``apply_patch(PATCH)``, or its name, applies the
patch until the test ends. Without pytest use `applied`. `untouched` checks that a call does not change a user's
objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .in_process import applied
from .side_effects import untouched

if TYPE_CHECKING:
    from .contract import PatchContract

__all__ = ["PatchContract", "applied", "untouched"]


def __getattr__(name: str) -> object:
    if name != "PatchContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .contract import PatchContract  # needs pytest

    return PatchContract
