"""The functions behind ``rlhf_patches.apply`` and its kin, and the one engine of the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from . import import_system, log, settings
from .engine import Engine
from .reporting import PatchError, Report
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
        VerifyError: RLHF_PATCHES_VERIFY, the process group is there already, and the ranks differ.
    """
    with import_system.loading():
        log.configure()
        path = os.environ.get("RLHF_PATCHES_REPORT")
        if path:
            from . import report_file  # json, socket and platform: only where they are needed

            engine.on_change = report_file.keep(path, engine.report)
        try:
            report = engine.apply(only, exclude, strict)
        except PatchError:  # what is not refused is applied all the same
            _arrange_verification()
            raise
        _arrange_verification()
        return report


def revert(only: Iterable[str] | str | None = None, exclude: Iterable[str] | str | None = None) -> Report:
    """Give every function its own code back, and stop waiting for imports. Without arguments: all patches.

    Args:
        only: names or globs of patches to revert; None means all.
        exclude: names or globs of patches to keep.

    Raises:
        SettingsError: a name is wrong; nothing was changed.
    """
    distributed = sys.modules.get("rlhf_patches.distributed")
    if distributed is not None and only is None and exclude is None:
        distributed.cancel()
    return engine.revert(only, exclude)


def report() -> Report:
    """The state of every registered patch now. An applied patch that somebody has undone shows as failed."""
    return engine.report()


def _arrange_verification() -> None:
    if settings.truth("VERIFY"):
        from . import distributed  # json, zlib: only where they are needed

        distributed.arrange()
