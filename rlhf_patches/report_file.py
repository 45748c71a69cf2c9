"""RLHF_PATCHES_REPORT: each process appends one line of JSON about itself when it ends."""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import sys
from collections.abc import Callable

from .log import logger, rank
from .reporting import Report

_registered = False


def write_at_exit(path: str, report: Callable[[], Report]) -> None:
    """Arrange for the line, once a process (a forked child inherits the arrangement)."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(lambda: append(path, report()))


def append(path: str, report: Report) -> None:
    """Append the line in one write, so that lines of many processes do not mix. Never raises."""
    line = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": rank(),
        "python": platform.python_version(),
        "command": sys.argv[:1],
        **report.to_dict(),
    }
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)
    except OSError as error:
        logger.warning("cannot write the report: %s", error)
