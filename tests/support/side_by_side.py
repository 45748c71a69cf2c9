"""The older releases that nox puts beside the newest ones, each in a folder of its own within the environment."""

from __future__ import annotations

import sys
from pathlib import Path


def on_path(name: str | None) -> dict[str, str]:
    """Environment variables for a process in which the releases of ``tests/environments/side-by-side/NAME.txt`` win.

    None stands for the environment's own releases.

    Raises:
        FileNotFoundError: the environment has no such folder.
    """
    if name is None:
        return {}
    folder = Path(sys.prefix) / "side-by-side" / name
    if not folder.is_dir():
        raise FileNotFoundError(f"no {folder}: make the environment again with nox -s environment")
    return {"PYTHONPATH": str(folder)}
