"""The main program of a proof's rank: ``rank.py WORKER ARGUMENTS`` runs the function ``main`` of the module WORKER.

It is started as a file: ``-m`` would put the user's folder, with unknown contents, first on sys.path.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import traceback

_PR_SET_PDEATHSIG = 1


def main() -> None:
    sys.path.pop(0)  # this folder
    if sys.platform == "linux":  # this process must not outlive the command
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.argv.pop(0)
    status = 0
    try:
        importlib.import_module("rlhf_patches.proving.states").as_released()
        importlib.import_module(sys.argv[0]).main()
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # After a failure gloo may be within a collective, whose threads abort a process at shutdown.
    os._exit(status)


if __name__ == "__main__":
    main()
