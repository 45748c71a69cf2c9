"""Clean up after a killed command: ``keeper.py FOLDER``, which needs the standard library alone.

It reads the ranks' sessions from its input, one per line, then ``done``. If the input ends earlier, the command was
killed, for example by SIGKILL: it then kills these sessions, including the ranks' children, and removes the folder.
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
    while os.path.exists(sys.argv[1]) and time.monotonic() < until:  # killed processes may still be writing
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
