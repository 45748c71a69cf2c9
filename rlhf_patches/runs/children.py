"""Python processes that this one starts and does not fork. They import everything anew: the site hook patches them."""

from __future__ import annotations

import contextlib
import os
import sys

from .. import settings
from ..settings import SettingsError

NOTE = "child processes that are spawned are patched only where they call apply(): apply(children=True) reaches them"
"""What a report says where the patches of this process are its own."""

_VARIABLE = settings.PREFIX + "AUTOLOAD"
_set_by_us = False


def check() -> None:
    """Raise unless `reach` can do what it is for.

    Raises:
        SettingsError: this environment has no site hook, or RLHF_PATCHES_AUTOLOAD is wrong or switches it off.
    """
    from .. import hook_files

    if _VARIABLE in os.environ and not settings.truth("AUTOLOAD"):
        raise SettingsError(
            f"{_VARIABLE}={os.environ[_VARIABLE]} keeps child processes unpatched, but apply(children=True) is there "
            "to patch them: leave one of them out"
        )
    if not hook_files.found():
        raise SettingsError(hook_files.NONE.format(", so apply(children=True) would reach no child"))


def reach() -> None:
    """Have the site hook patch the processes that this one starts from now on, and theirs."""
    global _set_by_us
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = "1"
        _set_by_us = True


def leave() -> None:
    """Undo `reach`, for those that are started from now on."""
    global _set_by_us
    if _set_by_us:
        os.environ.pop(_VARIABLE, None)
        _set_by_us = False


def are_reached() -> bool:
    """Whether the site hook patches the processes that this one starts."""
    # What has switched it on here is inherited. `site_hook` is not imported for this, as in its own `install`.
    if any(type(finder).__name__ == "_FirstImport" for finder in sys.meta_path):
        return True
    with contextlib.suppress(SettingsError):  # taken as 1 there
        if not settings.truth("AUTOLOAD"):
            return False
    from .. import hook_files  # site and sysconfig, which most runs need not have

    return hook_files.found() is not None
