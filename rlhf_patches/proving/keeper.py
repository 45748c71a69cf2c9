"""Outlives a command that does not come to its end: ``keeper.py FOLDER``, which needs the standard library alone.

From its input it reads the sessions of the ranks, one a line, then ``done``. Where that input ends before, the command
is gone, be it by SIGKILL: it kills these sessions, with what the ranks have started, and removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time


def main() -> None:
    ranks: list[int] = []
    for line in sys.stdin:
        if line == "done\n":
            return
        ranks.append(int(line))
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(rank, signal.SIGKILL)
    until = time.monotonic() + 10
    while os.path.exists(sys.argv[1]) and time.monotonic() < until:  # what is killed may still be writing
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
