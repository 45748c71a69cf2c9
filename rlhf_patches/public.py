"""The functions behind ``rlhf_patches.apply`` and its kin, and the one engine of the process."""

from __future__ import annotations

import os
from collections.abc import Iterable

from . import log
from .engine import Engine
from .reporting import Report
from .sources import fingerprint

__all__ = ["apply", "engine", "fingerprint", "report", "revert"]

engine = Engine()


def apply(
    only: Iterable[str] | str | None = None, exclude: Iterable[str] | str | None = None, strict: bool | None = None
) -> Report:
    """Apply every patch whose guards hold, now where the framework is imported, on import otherwise.

    Calling it again changes nothing that is applied; with another selection it adds patches. The variables
    RLHF_PATCHES_DISABLE and RLHF_PATCHES_ONLY restrict it further.

    Args:
        only: names or globs of patches to apply; None means all.
        exclude: names or globs of patches to leave out.
        strict: raise when a patch is refused or fails, also later, on import; None means RLHF_PATCHES_STRICT.

    Returns:
        the state of every registered patch.

    Raises:
        SettingsError: a name or a variable is wrong; nothing was changed.
        PatchError: strict mode and a refused or failed patch or an unusable plugin.
    """
    log.configure()
    path = os.environ.get("RLHF_PATCHES_REPORT")
    if path:
        from . import report_file  # json, socket and platform: only where they are needed

        engine.on_change = report_file.keep(path, engine.report)
    return engine.apply(only, exclude, strict)


def revert(only: Iterable[str] | str | None = None, exclude: Iterable[str] | str | None = None) -> Report:
    """Give every function its own code back, and stop waiting for imports. Without arguments: all patches.

    Args:
        only: names or globs of patches to revert; None means all.
        exclude: names or globs of patches to keep.

    Raises:
        SettingsError: a name is wrong; nothing was changed.
    """
    return engine.revert(only, exclude)


def report() -> Report:
    """The state of every registered patch now. An applied patch that somebody has undone shows as failed."""
    return engine.report()
