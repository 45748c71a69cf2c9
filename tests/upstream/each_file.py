"""Runs test files, each in a process of its own that has the distribution imported: ``each_file.py JOBS``.

An import takes longer than most files. JOBS is the JSON of ``module``, ``seconds`` (for each file) and ``runs``: of
each file pytest's arguments and where its output goes. Writes how each ended, pytest's status or why there is none, to
standard output as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    sys.path[0] = os.getcwd()  # as `python -m pytest` has it
    file = importlib.import_module(jobs["module"]).__file__
    if file is None or Path(file).is_relative_to(Path.cwd()):
        raise SystemExit(f"the tests would import {file} as {jobs['module']}, which is not what is installed")
    _without_network()
    ended: list[int | str] = []
    for run in jobs["runs"]:
        child = os.fork()
        if not child:
            raise SystemExit(_test(run))
        ended.append(_wait(child, jobs["seconds"]))
    print(json.dumps(ended))


def _without_network() -> None:
    """What asks for another host fails at once: an error of the network would be tried again, for a minute."""
    ask = socket.getaddrinfo

    def ask_here(host: Any, *arguments: Any, **more: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name and name not in ("localhost", socket.gethostname()) and not name[0].isdigit() and ":" not in name:
            raise RuntimeError(f"no network: {name}")
        return ask(host, *arguments, **more)

    socket.getaddrinfo = ask_here


def _test(run: dict[str, Any]) -> int:
    os.setsid()
    nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(run["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for place, stream in enumerate((nothing, log, log)):
        os.dup2(stream, place)
    return int(pytest.main(run["arguments"]))


def _wait(child: int, seconds: float) -> int | str:
    until, ended, status = time.monotonic() + seconds, 0, 0
    while not ended and time.monotonic() < until:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # with whatever it has started and left
    if ended:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(child, 0)
    return f"not done after {seconds:.0f} s"


if __name__ == "__main__":
    main()
