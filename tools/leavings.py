"""What a session has left behind: folders and files in its own temporary directory, and processes that still run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

KNOWN = ("pytest-of-*", "uv-*.lock")
"""pytest's own, the folders of its last three runs, for whoever looks at what has failed; and uv's locks."""
OURS = ("rlhf-patches-*", "forkserver-*", "effort-*")
"""What the package and its tests make, under these names."""
_SECONDS = 5.0
"""A process that is about to end has so long."""


def make() -> Path:
    """A temporary directory for one session.

    Not in this checkout: Ray and multiprocessing have sockets in it, whose paths may have 107 characters.
    """
    return Path(tempfile.mkdtemp(prefix="nox-"))


def left(folder: Path) -> list[str]:
    """The names of what lies there and should not."""
    return sorted(path.name for path in folder.iterdir() if not any(map(path.match, KNOWN)))


def is_ours(name: str) -> bool:
    """Whether only the package or its tests give such names."""
    return any(map(Path(name).match, OURS))


def remove(folder: Path) -> None:
    """Remove a session's folder."""
    shutil.rmtree(folder, ignore_errors=True)


def processes(folder: Path) -> dict[int, str]:
    """Those that were started with this folder for their temporary directory: by their numbers, their commands.

    Linux alone tells; elsewhere there are none.
    """
    found = {}
    wanted = os.fsencode(folder)
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if path.name != str(os.getpid()) and wanted in (path / "environ").read_bytes():
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(path.name)] = command.strip()[:200]
    return found


def end_processes(folder: Path) -> list[str]:
    """End those that do not end by themselves; returns the commands of these."""
    end = time.monotonic() + _SECONDS
    while (found := processes(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    for process in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    return sorted(found.values())
