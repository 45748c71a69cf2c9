"""The functions behind ``rlhf_patches.apply`` and its kin."""

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
    """Apply every patch whose guards hold, now where the framework is imported, on import otherwise.

    Calling it again changes nothing that is applied; with another selection it adds patches. The variables
    RLHF_PATCHES_DISABLE and RLHF_PATCHES_ONLY restrict it further. What upstream contests is applied where its name is
    in ``only``, RLHF_PATCHES_ONLY or RLHF_PATCHES_ENABLE; globs do not ask for it.

    Args:
        only: names or globs of patches to apply; None means all.
        disable: names or globs of patches not to apply.
        strict: raise when a patch is refused or fails, also later, on import; None means RLHF_PATCHES_STRICT.
        children: also patch the Python processes of this environment that this one starts from now on, however it does
            that, and theirs: it sets RLHF_PATCHES_AUTOLOAD=1. They follow the variables, so what is not to be applied
            is said by these and not by the arguments.

    Returns:
        the state of every registered patch.

    Raises:
        SettingsError: a name or a variable is wrong, or children cannot be reached; nothing was changed.
        PatchError: strict mode and a refused or failed patch or an unusable plugin.
        VerifyError: RLHF_PATCHES_VERIFY, the process group is there already, and the ranks differ.
    """
    with import_system.loading():
        if children:
            if not (only is None and disable is None and strict is None):
                raise settings.SettingsError(
                    "apply(children=True) with only, disable or strict: child processes do not get these. Set "
                    "RLHF_PATCHES_ONLY, RLHF_PATCHES_DISABLE or RLHF_PATCHES_STRICT, which hold for this process, too"
                )
            child_processes.check()
        log.configure()
        atexit.unregister(engine.end)  # once, however often this is called
        atexit.register(engine.end)
        path = os.environ.get("RLHF_PATCHES_REPORT")
        if path:
            from .runs import report_file  # json, socket and platform: only where they are needed

            engine.on_change = report_file.keep(path, engine.report)
        try:
            report = engine.apply(only, disable, strict)
        except PatchError:  # what is not refused is applied all the same
            _arrange(children)
            raise
        except settings.SettingsError as error:  # a user's mistake: how we found it is of no use
            raise error.with_traceback(None) from None
        _arrange(children)
        return _noted(report)


def revert(only: Iterable[str] | str | None = None, keep: Iterable[str] | str | None = None) -> Report:
    """Give every function its own code back, and stop waiting for imports. Without arguments: all patches.

    Args:
        only: names or globs of patches to revert; None means all.
        keep: names or globs of patches not to revert.

    Returns:
        the state of every registered patch; one that could not be taken off is `failed`.

    Raises:
        SettingsError: a name is wrong; nothing was changed.
    """
    if only is None and keep is None:
        child_processes.leave()
        process_group = sys.modules.get("rlhf_patches.runs.process_group")
        if process_group is not None:
            process_group.cancel()
    return engine.revert(only, keep)


def report() -> Report:
    """The state of every registered patch now. An applied patch that other code has undone shows as failed.

    Nothing is imported, applied or reverted; at most the patches are loaded, where that has not been done yet.

    Returns:
        one row per patch, in the order of registration, and the plugins that cannot be used.

    Raises:
        SettingsError: RLHF_PATCHES_PLUGINS is wrong, and the patches are loaded only now.
    """
    return _noted(engine.report())


def in_force(name: str) -> bool:
    """Whether a patch is what runs at this moment at each of its targets, whatever has changed them since `apply`.

    For implementations, which ask it within training: it takes no lock, imports nothing, and costs some microseconds
    per target. While the patch is being applied or reverted, it is not in force.

    Args:
        name: a registered patch; no glob.

    Raises:
        SettingsError: there is no such patch.
    """
    return engine.in_force(name)


def matched(name: str, target: str) -> str:
    """The fingerprint that a target had when a patch was last applied to it: which shape of upstream's code this is.

    For implementations, which ask it within training: it takes no lock and imports nothing. The patch's definition
    names the releases of each fingerprint. The answer stays after a revert, for calls that were under way.

    Args:
        name: the patch, as a rule the implementation's own.
        target: ``module:qualified.name``, as in the `Replace` or `Wrap` whose ``fingerprints`` were looked through.

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
        from .runs import process_group  # json, zlib: only where they are needed

        process_group.arrange()
