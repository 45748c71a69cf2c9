"""Standard logging under the name ``rlhf_patches``: on rank 0 unless told otherwise, each thing once."""

from __future__ import annotations

import logging
import os
import sys

from . import settings
from .reporting import PatchReport, Status

logger = logging.getLogger("rlhf_patches")
# Launchers name the rank differently; the first that is set counts.
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_said: set[tuple[str, Status, str]] = set()


def configure(default: str | None = None) -> None:
    """Print our messages to standard error at the level of RLHF_PATCHES_LOG, or ``default`` when it is unset.

    Does nothing when neither is given: then the application's own logging decides.
    """
    level = settings.log_level()[0] or default
    if level is None:
        return
    logger.setLevel(logging.CRITICAL + 1 if level == "off" else level.upper())
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[rlhf_patches] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def speaks() -> bool:
    """Whether this process is one that logs: rank 0, or every rank when asked for."""
    try:
        everywhere = settings.log_level()[1]
    except settings.SettingsError:
        everywhere = True
    return everywhere or rank() in (None, "0")


def rank() -> str | None:
    """This process's rank as its launcher has set it, None outside a launcher."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), None)


def announce(row: PatchReport) -> None:
    """Log what became of a patch: applied at level info, what needs attention as a warning, the rest for debugging."""
    what = (row.name, row.status, row.reason)
    if what in _said or not speaks():
        return
    _said.add(what)
    level = logging.WARNING if row.needs_attention else logging.INFO if row.status is Status.APPLIED else logging.DEBUG
    logger.log(level, "%s %s: %s", row.status, row.name, row.reason)
