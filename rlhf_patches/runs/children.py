"""Python processes that this process spawns. They import everything again, so the site hook patches them."""

from __future__ import annotations

import contextlib
import os
import sys

from .. import settings
from ..settings import SettingsError

NOTE = "spawned child processes are patched only if they call apply(); apply(children=True) patches them"
"""The note of a report if only this process is patched."""

_VARIABLE = settings.PREFIX + "AUTOLOAD"
_set_by_us = False


def check() -> None:
    """Raise unless `reach` can work.

    Raises:
        SettingsError: this environment has no site hook, or RLHF_PATCHES_AUTOLOAD is wrong or switches it off.
    """
    from . import hook_files

    if _VARIABLE in os.environ and not settings.truth("AUTOLOAD"):
        raise SettingsError(
            f"{_VARIABLE}={os.environ[_VARIABLE]} keeps child processes unpatched, but apply(children=True) patches "
            "them: remove one of the two"
        )
    if not hook_files.active():
        raise SettingsError(hook_files.NONE.format(", so apply(children=True) would patch no child"))


def reach() -> None:
    """Let the site hook patch the processes that this process starts from now on, and their children."""
    global _set_by_us
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = "1"
        _set_by_us = True


def leave() -> None:
    """Undo `reach` for processes that are started from now on."""
    global _set_by_us
    if _set_by_us:
        os.environ.pop(_VARIABLE, None)
        _set_by_us = False


def are_reached() -> bool:
    """Whether the site hook patches the processes that this process starts."""
    # Children inherit what enabled the hook here. `site_hook` is not imported for this, as in its own `install`.
    if any(type(finder).__name__ == "_FirstImport" for finder in sys.meta_path):
        return True
    with contextlib.suppress(SettingsError):  # the site hook treats it as 1
        if not settings.truth("AUTOLOAD"):
            return False
    from . import hook_files  # imports site and sysconfig, which most runs do not need

    return hook_files.active() is not None
