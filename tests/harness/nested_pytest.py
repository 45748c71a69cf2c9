"""A pytest that a test starts."""

from __future__ import annotations

from pathlib import Path


def alone(folder: Path) -> list[str]:
    """Options that keep it to itself.

    Without plugins that take their time to load, and with temporary folders in ``folder``: among everybody's it would
    remove what earlier sessions have left there, which takes longer than its own tests.
    """
    plugins = ("cacheprovider", "xdist", "hypothesispytest")
    return [*(f"-pno:{plugin}" for plugin in plugins), f"--basetemp={folder / 'temporary'}"]
