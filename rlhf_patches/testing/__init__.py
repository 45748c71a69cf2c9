"""For the tests of a patch, under pytest: the contract that every patch keeps, and one patch applied for a while.

    from rlhf_patches.testing import PatchContract
    from my_plugin import PATCH

    class TestContract(PatchContract):
        patch = PATCH

Where rlhf-patches is installed, pytest has the fixture ``apply_patch``: ``apply_patch(PATCH)``, or its name, applies it
until the test ends. Without pytest there is `applied`. `untouched` holds a call to leaving what a user has as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .side_effects import untouched
from .in_process import applied

if TYPE_CHECKING:
    from .contract import PatchContract

__all__ = ["PatchContract", "applied", "untouched"]


def __getattr__(name: str) -> object:
    if name != "PatchContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .contract import PatchContract  # which needs pytest

    return PatchContract
