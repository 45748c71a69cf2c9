"""What pytest loads wherever rlhf-patches is installed: one fixture. Nothing is patched, or imported, until it is used.

Where it is not loaded (``-p no:rlhf_patches``), ``from rlhf_patches.pytest_plugin import apply_patch`` brings it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .definitions.patch import Patch
    from .definitions.status import PatchReport


@pytest.fixture
def apply_patch() -> Iterator[Callable[[Patch | str], PatchReport]]:
    """Applies one patch until the test ends: ``apply_patch("name")`` or ``apply_patch(PATCH)``; its row is returned.

    The test fails if it is not applied, or not taken off again. Other patches are left as they are.
    """
    with contextlib.ExitStack() as until_the_end:

        def apply(patch: Patch | str) -> PatchReport:
            __tracebackhide__ = True
            from .settings import SettingsError
            from .testing import in_process

            try:
                return until_the_end.enter_context(in_process.applied(patch))
            except (AssertionError, SettingsError, TypeError) as error:  # whose messages say all
                raise error.with_traceback(None) from None

        yield apply
