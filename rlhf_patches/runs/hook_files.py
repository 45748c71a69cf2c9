"""Locates the site hook's files: the ``.pth`` of a wheel, or the one of ``autoload on``."""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

SWITCHED_ON = "rlhf_patches_autoload.pth"
"""The file of ``autoload on``. It sorts after an editable install's own .pth, which must come first."""

NONE = (
    "this environment has no site hook{} (an editable install has none, and Python does not run the hook of "
    "`pip install --target`): run `rlhf-patches autoload on` once, or install the wheel"
)
"""The message if `active` returns None; the braces are for the consequence."""


def active() -> Path | None:
    """Return the hook of this environment, ``autoload on``'s before the wheel's; None if there is none."""
    # The folder of `autoload on`, or that of the package (a wheel, also in the user's own site-packages).
    folders = [folder()]
    if not outside():
        folders.append(_beside())
    for each in dict.fromkeys(folders):
        for name in (SWITCHED_ON, "rlhf_patches.pth"):
            if (each / name).exists():
                return each / name
    return None


def outside() -> Path | None:
    """Return the wheel's hook, if Python does not run it: `pip install --target`, a path on PYTHONPATH."""
    read = [folder(), *map(Path, site.getsitepackages())]
    if site.ENABLE_USER_SITE:
        read.append(Path(site.getusersitepackages()))
    file = _beside() / "rlhf_patches.pth"
    return file if file.exists() and _beside() not in [each.resolve() for each in read] else None


def folder() -> Path:
    """Return the environment's site-packages."""
    return Path(sysconfig.get_path("purelib"))


def _beside() -> Path:
    return Path(__file__).resolve().parents[2]
