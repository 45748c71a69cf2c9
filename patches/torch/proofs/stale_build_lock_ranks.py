"""Processes that build one C++ extension by ``torch.utils.cpp_extension.load``: ``--out FOLDER [--short S] CASE...``.

Each process is a fork, which builds and loads with a real compiler. A wrapper of the compiler records its calls, and
waits while a file exists, so that builders can be killed in the middle of a build. Each case has its own
``TORCH_EXTENSIONS_DIR``.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.utils.cpp_extension

import rlhf_patches
from rlhf_patches.patches.torch import _build_lock
from rlhf_patches.proving import states

NAME = "torch-stale-build-lock"
ENOUGH = 60.0
"""Seconds within which every process that ends has ended."""
SHORT = 2.0
"""Seconds to observe a process that does not end; a build takes half a second."""
COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
    echo $$ >> "$STATION/compiled"
    while [ -e "$STATION/hold" ]; do sleep 0.05; done;;
esac
exec c++ "$@"
"""


class Station:
    """A folder with a source, the compiler wrapper, and the build."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.lock = self.folder / "extensions" / "tiny" / "lock"
        self.hold, self.compiled = self.folder / "hold", self.folder / "compiled"
        (self.folder / "tiny.cpp").write_text('extern "C" int answer() { return 42; }\n')
        compiler = self.folder / "compiler"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        os.environ.update(STATION=folder, CXX=str(compiler), TORCH_EXTENSIONS_DIR=str(self.folder / "extensions"))

    @property
    def compilations(self) -> int:
        return len(self.compiled.read_text().split()) if self.compiled.exists() else 0

    def start(self, *, patched: bool = True, again: bool = False) -> Process:
        """A process that loads the extension; ``again``: after it was loaded, with a lock file of no process."""
        return Process(self, patched, again)

    def builder(self, *, patched: bool) -> Process:
        """A process whose compiler waits."""
        self.hold.touch()
        started = self.start(patched=patched)
        until(lambda: self.compilations == 1)
        return started

    def killed(self, *, patched: bool) -> dict[str, Any]:
        """The state after a builder is killed with all its children, as by Slurm or with its container."""
        started = self.builder(patched=patched)
        os.killpg(started.pid, signal.SIGKILL)
        started.ended()
        self.hold.unlink()
        return {"lock": self.lock.read_text(), "built": self.lock.with_name("tiny.so").exists()}


class Process:
    """A fork, the leader of its own process group, which loads the extension and reports the result."""

    def __init__(self, station: Station, patched: bool, again: bool) -> None:
        self.place = station.folder / f"said-{time.monotonic_ns()}"
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            self._load(station, patched, again)
        os.setpgid(self.pid, self.pid)

    def _load(self, station: Station, patched: bool, again: bool) -> None:
        lines: list[str] = []
        began = time.monotonic()
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("rlhf_patches").addHandler(handler)
        try:
            if not patched:
                rlhf_patches.revert()
            sources = [str(station.folder / "tiny.cpp")]
            library = torch.utils.cpp_extension.load(name="tiny", sources=sources, is_python_module=False)
            if again:
                station.lock.touch()
                torch.utils.cpp_extension.load(name="tiny", sources=sources, is_python_module=False)
            found = {"answer": ctypes.CDLL(str(library)).answer(), "lines": lines, "lock": station.lock.exists()}
            found["seconds"] = time.monotonic() - began
        except BaseException as error:
            found = {"error": repr(error), "lines": lines}
        unfinished = self.place.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(found))
        unfinished.rename(self.place)
        os._exit(0)

    def ended(self, seconds: float = ENOUGH) -> bool:
        until_ = time.monotonic() + seconds
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > until_:
                return False
            time.sleep(0.02)
        return True

    def result(self) -> dict[str, Any]:
        """The result; ``waits`` if the process did not end in time and was killed."""
        if self.ended():
            return dict(json.loads(self.place.read_text()))
        return self.still_waits(0)

    def still_waits(self, seconds: float | None = None) -> dict[str, Any]:
        """Whether the process waits for that long, or for `SHORT`; it is killed then."""
        if self.ended(SHORT if seconds is None else seconds):
            return dict(json.loads(self.place.read_text()))
        os.killpg(self.pid, signal.SIGKILL)
        self.ended()
        return {"waits": True}


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + ENOUGH
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("nothing was compiled")
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------ cases


def killed(station: Station) -> dict[str, Any]:
    """A builder and a waiting process without the patch; then a process with the patch."""
    left = station.killed(patched=False)
    return {"left": left, "without": station.start(patched=False).still_waits(), "with": station.start().result()}


CASES: dict[str, Callable[[Station], dict[str, Any]]] = {"killed": killed}


def main(cases: dict[str, Callable[[Station], dict[str, Any]]] = CASES) -> None:
    global SHORT
    parser = states.parser()
    parser.add_argument("--short", type=float, default=SHORT, help="seconds for which is watched who does not end")
    parser.add_argument("cases", nargs="+", choices=cases)
    options = parser.parse_args()
    SHORT = options.short
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja's
    os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] = "1"  # torch runs every compiler to get its name
    _build_lock.TELL_SECONDS = 0.5
    row = rlhf_patches.apply(only=NAME)[NAME]
    found: dict[str, Any] = {"version": row.version, "status": row.status.value}
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for case in options.cases[rank::ranks]:  # most of the time is waiting
        with tempfile.TemporaryDirectory() as folder:
            found[case] = cases[case](Station(folder))
    (options.out / f"rank{rank}.json").write_text(json.dumps(found, indent=1))
