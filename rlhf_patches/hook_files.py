"""Where the site hook's files are: the ``.pth`` that a wheel ships, or the one that ``autoload on`` writes."""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path

SWITCHED_ON = "rlhf_patches_autoload.pth"
"""What ``autoload on`` writes. It sorts after an editable install's own .pth, which has to come first."""

NONE = (
    "this environment has no site hook{} (an editable install ships none, and that of `pip install --target` is not "
    "run): run `rlhf-patches autoload on` once, or install the wheel"
)
"""What to say where `found` is None; with what follows from it in the braces."""


def found() -> Path | None:
    """The hook of this environment, ``autoload on``'s before the wheel's; None in an editable install without it."""
    # Where `autoload on` writes, or beside the package (a wheel, also one in the user's own site-packages).
    folders = [folder()]
    if not outside():
        folders.append(_beside())
    for each in dict.fromkeys(folders):
        for name in (SWITCHED_ON, "rlhf_patches.pth"):
            if (each / name).exists():
                return each / name
    return None


def outside() -> Path | None:
    """The wheel's hook, if it lies where Python runs no .pth files: `pip install --target`, a path on PYTHONPATH."""
    read = [folder(), *map(Path, site.getsitepackages())]
    if site.ENABLE_USER_SITE:
        read.append(Path(site.getusersitepackages()))
    file = _beside() / "rlhf_patches.pth"
    return file if file.exists() and _beside() not in [each.resolve() for each in read] else None


def folder() -> Path:
    """The environment's site-packages."""
    return Path(sysconfig.get_path("purelib"))


def _beside() -> Path:
    return Path(__file__).resolve().parent.parent
