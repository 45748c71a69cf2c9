"""Processes that have loaded a framework and are forked, once per scenario and rank.

``python forkserver_process.py SOCKET`` starts the first one, which has loaded nothing. On request a process forks
another that loads one thing more (torch; megatron-core; a release of SkyRL): a tree, so that what several need is
loaded once. Or it forks ranks: fresh copies of itself, each with the variables that a launcher sets. A copy that has
run is thrown away, so nothing crosses from one scenario to the next. The protocol is one line of JSON each way:

    {"level": {"load": MODULE:FUNCTION, "path": FOLDER or null}}   ->  {"socket": PATH}
    {"run": {"worker": MODULE, "argv": [...], "ranks": N, ...}}    ->  {"ended": [STATUS, ...], ...}
    either                                                         ->  {"refused": WHY}: run it under torchrun

Everything ends when the standard input of the first one does.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
STACKS = signal.SIGUSR2
OWN = {"tests", "setuptools", "_distutils_hack"}
"""Loaded whatever a folder has of that name: see `bind`; a release wants of setuptools pkg_resources only."""
PORT = 5
"""Characters of a port's number, as the ranks of a run read it."""
GRACE = 10.0
"""Seconds for the other ranks when one has failed: they report what they saw of it, then they are killed."""


def bind(name: str) -> None:
    """Let ``import NAME`` find this checkout's folder, whatever else of that name is on sys.path (ms-swift's wheels
    have ``tests``).

    Nothing is put on sys.path: with this checkout there, an installed copy of the package would not be found.
    """
    location = ROOT / name
    spec = importlib.util.spec_from_file_location(
        name, location / "__init__.py", submodule_search_locations=[str(location)]
    )
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)


def call(name: str) -> None:
    """``MODULE:FUNCTION``, without arguments; without a function, ``main``."""
    module, _, function = name.partition(":")
    getattr(importlib.import_module(module), function or "main")()


def unforkable() -> str | None:
    """Why this process cannot be forked, or None. A thread that holds a lock at the fork holds it for ever."""
    if sys.platform != "linux":
        return f"fork is not safe on {sys.platform} once frameworks are loaded"
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(names) > 1 or threading.active_count() > 1:
        return f"the fork server has {len(names)} threads ({', '.join(names)})"
    return None


def launcher_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Those of torchrun, whose agent hosts the store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "forkserver",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class Server:
    """A fork server."""

    def __init__(self, path: str, listener: socket.socket, lifeline: int) -> None:
        self.path = path
        self.listener = listener
        self.lifeline = lifeline
        self.failed: str | None = None
        self.children: dict[str, str] = {}
        self.pids: set[int] = set()

    def serve(self) -> NoReturn:
        """Until the lifeline ends; waits for all children, so that their CPU seconds are counted."""
        while True:
            both: list[Any] = [self.listener, self.lifeline]
            readable, _, _ = select.select(both, [], [], 1.0)
            self.reap(os.WNOHANG)
            if self.lifeline in readable:
                self.reap(0)
                os._exit(0)
            if self.listener in readable:
                connection, _ = self.listener.accept()
                with connection:
                    self.answer(connection)

    def reap(self, flags: int) -> None:
        for pid in list(self.pids):
            try:
                ended, _ = os.waitpid(pid, flags)
            except ChildProcessError:
                ended = pid
            if ended:
                self.pids.discard(pid)

    def answer(self, connection: socket.socket) -> None:
        line = connection.makefile("r").readline()
        if not line:
            return
        request = json.loads(line)
        refused = self.failed or unforkable()
        if refused is not None:
            say(connection, {"refused": refused})
        elif "level" in request:
            say(connection, {"socket": self.child(request["level"])})
        else:
            # A process of its own waits for the ranks, so that this one can serve the next.
            pid = os.fork()
            if pid == 0:
                self.listener.close()
                finish(lambda: Run(connection, **request["run"]).go())
            self.pids.add(pid)

    def child(self, level: Mapping[str, Any]) -> str:
        """The socket of the process that has loaded one level more; requests wait in it until it has."""
        key = json.dumps(level, sort_keys=True)
        if key not in self.children:
            path = f"{self.path}-{len(self.children)}"
            listener = listen(path)
            pid = os.fork()
            if pid == 0:
                self.listener.close()
                die_with_parent()
                server = Server(path, listener, self.lifeline)
                try:
                    load(level)
                except BaseException:
                    server.failed = f"{level['load']} failed:\n{traceback.format_exc()}"
                server.serve()
            listener.close()
            self.pids.add(pid)
            self.children[key] = path
        return self.children[key]


def load(level: Mapping[str, Any]) -> None:
    """Load a level in this process."""
    from tests.harness import effort

    before = effort.cpu_seconds()
    if level["path"] is not None:
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (level["path"], inherited)))
        folders = level["path"].split(os.pathsep)
        for folder in folders:
            check_not_loaded(folder)
        sys.path[:0] = folders
        importlib.invalidate_caches()
    call(level["load"])
    gc.collect()
    gc.freeze()  # else the collector's marks copy every page in every rank
    effort.note(f"loading {level['load'].rpartition(':')[2]}", effort.cpu_seconds() - before)


def check_not_loaded(folder: str) -> None:
    """Refuse a release's folder where another copy of what it has would be used all the same."""
    for path in Path(folder).iterdir():
        if path.name in OWN:
            continue
        file = getattr(sys.modules.get(path.name), "__file__", None)
        if file is not None and not Path(file).is_relative_to(path):
            raise RuntimeError(f"{path} comes too late: {path.name} is loaded already, from {file}")


class Run:
    """Ranks of one scenario, forked from this process, which hosts torch's store, as a launcher's agent, and waits."""

    def __init__(
        self,
        connection: socket.socket,
        worker: str,
        argv: Sequence[str],
        ranks: int,
        settings: Mapping[str, str],
        out: str,
        timeout: float,
    ) -> None:
        self.connection = connection
        self.worker = worker
        self.argv = argv
        self.ranks = ranks
        self.settings = settings
        self.out = Path(out)
        self.timeout = timeout
        self.running: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def go(self) -> None:
        """Run the ranks, and answer."""
        die_with_parent()
        reading, writing = os.pipe()
        for rank in range(self.ranks):
            pid = os.fork()
            if pid == 0:
                os.close(writing)
                finish(lambda rank=rank: self.be_rank(rank, reading))
            self.running[pid] = rank
        os.close(reading)
        # After the forks: it has threads.
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(writing, f"{store.port:{PORT}}".encode() * self.ranks)
        os.close(writing)
        timed_out = self.wait()
        for group in self.running:
            kill(group)
        while self.running:
            self.reap(0)
        from tests.harness import effort

        spent = effort.cpu_seconds()
        effort.note(f"{self.ranks} ranks of {self.worker} {' '.join(self.argv[2:])}", spent)
        ended = [self.ended[rank] for rank in range(self.ranks)]
        say(self.connection, {"ended": ended, "timed_out": timed_out, "cpu": spent})

    def be_rank(self, rank: int, reading: int) -> None:
        """In the fork: what a fresh interpreter would have, then the worker's function."""
        os.setsid()
        die_with_parent()
        self.connection.close()
        port = os.read(reading, PORT)
        os.close(reading)
        if not port:
            raise RuntimeError("the process that hosts the store has ended")
        log = os.open(self.out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(log, stream)
        faulthandler.enable(file=2)
        faulthandler.register(STACKS, file=2, all_threads=True)
        os.environ.update(launcher_variables(rank, self.ranks, int(port)), **self.settings)
        reseed()
        sys.argv = [self.worker, *self.argv]
        call(self.worker)

    def wait(self) -> bool:
        """Until all have ended, or the time is over; whether it was. A rank that fails leaves the others little."""
        end = time.monotonic() + self.timeout
        while self.running and time.monotonic() < end:
            self.reap(os.WNOHANG)
            if any(self.ended.values()):
                end = min(end, time.monotonic() + GRACE)
            # The client says nothing more; if it is gone, nobody waits for these ranks.
            if select.select([self.connection], [], [], 0.02)[0]:
                return False
        if self.running:
            for pid in self.running:
                os.kill(pid, STACKS)
            time.sleep(1)
        return bool(self.running) and not any(self.ended.values())

    def reap(self, flags: int) -> None:
        for pid, rank in list(self.running.items()):
            ended, status = os.waitpid(pid, flags)
            if ended:
                self.ended[rank] = os.waitstatus_to_exitcode(status)
                del self.running[pid]
                kill(pid)  # children of its own


def reseed() -> None:
    """Python's and NumPy's generators begin with entropy, which the forks would share. torch's begin the same."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def finish(function: Any) -> NoReturn:
    """Run a forked process's function and end the process, as an interpreter ends: nothing of the caller goes on."""
    status = 1
    try:
        function()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def die_with_parent() -> None:
    """Also where the parent is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def kill(group: int) -> None:
    """Kill a process and the children that it has left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def listen(path: str) -> socket.socket:
    """The socket has its name only once it takes connections: whoever has waited for the name connects at once."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    return listener


def say(connection: socket.socket, answer: Mapping[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(answer).encode() + b"\n")
    except BrokenPipeError:  # the client has gone
        pass


def main() -> None:
    (path,) = sys.argv[1:]
    sys.path.pop(0)  # this folder, whose names are nobody else's business
    bind("tests")
    bind("hunt")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's: it closes the lifeline
    # One thread: pyarrow's allocator would start another, OpenBLAS and OpenMP as many as there are cores.
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", JE_ARROW_MALLOC_CONF="background_thread:false")
    for name in [name for name in os.environ if name.startswith("RLHF_PATCHES_")]:
        del os.environ[name]
    Server(path, listen(path), lifeline=0).serve()


if __name__ == "__main__":
    main()
