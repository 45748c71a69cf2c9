"""The pytest plugin of rlhf-patches: one fixture. It patches and imports nothing until a test uses the fixture.

Without the plugin (``-p no:rlhf_patches``), use ``from rlhf_patches.pytest_plugin import apply_patch``.
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
    """Apply one patch until the test ends: ``apply_patch("name")`` or ``apply_patch(PATCH)`` returns its report row.

    The test fails if the patch is not applied or not reverted. Other patches do not change.
    """
    with contextlib.ExitStack() as until_the_end:

        def apply(patch: Patch | str) -> PatchReport:
            __tracebackhide__ = True
            from .settings import SettingsError
            from .testing import in_process

            try:
                return until_the_end.enter_context(in_process.applied(patch))
            except (AssertionError, SettingsError, TypeError) as error:  # the message suffices without a traceback
                raise error.with_traceback(None) from None

        yield apply
