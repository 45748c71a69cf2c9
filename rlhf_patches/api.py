"""The public functions ``rlhf_patches.apply``, ``revert``, ``report`` and others."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from dataclasses import replace

from . import import_system, settings
from .definitions.status import PatchError, Report, Status
from .engine import log
from .engine.engine import engine
from .guards.fingerprints import fingerprint
from .runs import children as child_processes

__all__ = ["apply", "fingerprint", "in_force", "matched", "report", "revert"]


def apply(
    only: Iterable[str] | str | None = None,
    disable: Iterable[str] | str | None = None,
    strict: bool | None = None,
    children: bool = False,
) -> Report:
    """Apply every patch whose guards match, now if the framework is imported, otherwise on import.

    Another call does not change applied patches; with another selection it adds patches. The variables
    RLHF_PATCHES_DISABLE and RLHF_PATCHES_ONLY restrict it further. A contested patch is applied only if its name is in
    ``only``, RLHF_PATCHES_ONLY or RLHF_PATCHES_ENABLE; globs do not enable it.

    Args:
        only: names or globs of patches to apply; None means all.
        disable: names or globs of patches not to apply.
        strict: raise if a patch is refused or fails, also later, on import; None means RLHF_PATCHES_STRICT.
        children: also patch the Python processes of this environment that this process starts from now on, in any way,
            and their children: it sets RLHF_PATCHES_AUTOLOAD=1. Children follow the variables, not the arguments.

    Returns:
        the status of every registered patch.

    Raises:
        SettingsError: a name or a variable is invalid, or children cannot be patched; nothing was changed.
        PatchError: strict mode and a refused or failed patch or an unusable plugin.
        VerifyError: RLHF_PATCHES_VERIFY is set, the process group exists, and the ranks differ.
    """
    with import_system.loading():
        if children:
            if not (only is None and disable is None and strict is None):
                raise settings.SettingsError(
                    "apply(children=True) with only, disable or strict: child processes do not get these. Set "
                    "RLHF_PATCHES_ONLY, RLHF_PATCHES_DISABLE or RLHF_PATCHES_STRICT, which also hold for this process"
                )
            child_processes.check()
        log.configure()
        atexit.unregister(engine.end)  # once, even if called again
        atexit.register(engine.end)
        path = os.environ.get("RLHF_PATCHES_REPORT")
        if path:
            from .runs import report_file  # imports json, socket and platform, so only on demand

            engine.on_change = report_file.keep(path, engine.report)
        try:
            report = engine.apply(only, disable, strict)
        except PatchError:  # the other patches are applied
            _arrange(children)
            raise
        except settings.SettingsError as error:  # a user's error: our traceback does not help
            raise error.with_traceback(None) from None
        _arrange(children)
        return _noted(report)


def revert(only: Iterable[str] | str | None = None, keep: Iterable[str] | str | None = None) -> Report:
    """Restore the original code of every function, and stop waiting for imports. Without arguments: all patches.

    Args:
        only: names or globs of patches to revert; None means all.
        keep: names or globs of patches not to revert.

    Returns:
        the status of every registered patch; a patch that could not be reverted is `failed`.

    Raises:
        SettingsError: a name is invalid; nothing was changed.
    """
    if only is None and keep is None:
        child_processes.leave()
        process_group = sys.modules.get("rlhf_patches.runs.process_group")
        if process_group is not None:
            process_group.cancel()
    return engine.revert(only, keep)


def report() -> Report:
    """Return the current status of every registered patch. An applied patch that other code has undone is failed.

    Nothing is imported, applied or reverted; the patches are loaded if they are not loaded yet.

    Returns:
        one row per patch, in the order of registration, and the plugins that cannot be used.

    Raises:
        SettingsError: RLHF_PATCHES_PLUGINS is invalid, and the patches are loaded only now.
    """
    return _noted(engine.report())


def in_force(name: str) -> bool:
    """Whether a patch runs at this moment at each of its targets, also if other code changed them after `apply`.

    For implementations, which call it within training: it takes no lock, imports nothing, and costs some microseconds
    per target. While the patch is being applied or reverted, it is not in force.

    Args:
        name: a registered patch, not a glob.

    Raises:
        SettingsError: there is no such patch.
    """
    return engine.in_force(name)


def matched(name: str, target: str) -> str:
    """Return the fingerprint of a target when a patch was last applied to it: the shape of upstream's code.

    For implementations, which call it within training: it takes no lock and imports nothing. The patch's definition
    names the releases of each fingerprint. The result remains after a revert, for calls that are still running.

    Args:
        name: the patch, usually the implementation's own.
        target: ``module:qualified.name``, as in the `Replace` or `Wrap` with the ``fingerprints``.

    Returns:
        16 hex digits.

    Raises:
        SettingsError: there is no such patch, or it has no such target with fingerprints.
        PatchError: the patch has not been applied to it in this process.
    """
    return engine.matched(name, target)


def _noted(report: Report) -> Report:
    acts = report.with_status(Status.APPLIED, Status.PENDING)
    return replace(report, notes=(child_processes.NOTE,)) if acts and not child_processes.are_reached() else report


def _arrange(children: bool) -> None:
    if children:
        child_processes.reach()
    if settings.truth("VERIFY"):
        from .runs import process_group  # imports json and zlib, so only on demand

        process_group.arrange()
