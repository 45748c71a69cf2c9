"""What releases that do not work together raise, in a process of its own, by which `diagnose` is held against it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.harness import unpacked

TIMEOUT = 600
"""Seconds. Two cores, busy with other tests, take 40 for the slowest."""


def log_of(code: str, *releases: str, folders: tuple[str, ...] = ()) -> str:
    """What a process writes to its standard error that runs ``code``; empty where it ends well.

    Args:
        code: what is run.
        releases: each ``NAME==VERSION``, in front of the environment's own.
        folders: more of them.
    """
    path = os.pathsep.join([*([unpacked.folders(*releases)] if releases else []), *folders])
    # Nothing of ours: what is raised is upstream's.
    settings = {**os.environ, "PYTHONPATH": path, "RLHF_PATCHES_AUTOLOAD": "0", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=settings, capture_output=True, text=True, timeout=TIMEOUT
    )
    return done.stderr if done.returncode else ""
