"""The older releases that nox puts beside the newest ones, each in a folder of its own within the environment."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(sys.prefix) / "side-by-side"


def folder(name: str) -> Path:
    """Where the releases of ``tests/environments/side-by-side*/NAME.txt``, of this environment, are.

    Raises:
        FileNotFoundError: the environment has no such folder.
    """
    found = ROOT / name
    if not found.is_dir():
        raise FileNotFoundError(f"no {found}: make the environment again with nox -s environment")
    return found


def on_path(name: str | None) -> dict[str, str]:
    """Environment variables for a process in which those releases win; None stands for the environment's own."""
    return {} if name is None else {"PYTHONPATH": str(folder(name))}
