"""Ranks without a launcher: processes that may each have an interpreter and variables of their own, and may die."""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.forkserver import TORCH, ForkServer


@dataclass(frozen=True)
class Ended:
    """A rank that has ended. ``said`` is the last line of its standard output, as JSON; None if there is none."""

    status: int
    said: Any
    errors: str

    @classmethod
    def of(cls, status: int, output: str, errors: str) -> Ended:
        """From what a process has written."""
        lines = [line for line in output.splitlines() if line.startswith(("{", "["))]
        return cls(status, json.loads(lines[-1]) if lines else None, errors)


def free_port() -> int:
    """A port on which nothing listens: this process has a hundred of its own, and takes each in its turn.

    A port may be drawn minutes before a rank listens on it. They are none that the system itself gives to gloo and
    others (ephemeral), and none that Ray keeps for its workers (10002 to 19999), among which it refuses its own.
    """
    for port in _ports(os.getpid()):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError


@functools.cache
def _ports(_process: int) -> Iterator[int]:
    for block in range(20000, 32000, 100):
        taken = socket.socket(socket.AF_UNIX)
        try:
            taken.bind(f"\0rlhf_patches' ports from {block}")  # Linux frees the name when the process ends
        except OSError:
            taken.close()
            continue
        _taken.append(taken)
        return itertools.cycle(range(block, block + 100))
    raise AssertionError("120 processes draw ports")


_taken: list[socket.socket] = []


def run(
    worker: Path,
    arguments: Sequence[str] = (),
    ranks: int = 2,
    *,
    python: str | Mapping[int, str] = sys.executable,
    settings: Mapping[str, str] | None = None,
    own: Mapping[int, Mapping[str, str]] | None = None,
    port: int | None = None,
    timeout: float = 240,
) -> list[Ended]:
    """Start the worker on every rank with the variables that launchers set, and wait for all.

    Args:
        worker: the script.
        arguments: its arguments.
        ranks: how many.
        python: the interpreter, or one for some ranks.
        settings: variables of every rank; those of rlhf_patches that are set already are left out.
        own: more variables of single ranks.
        port: of a store that somebody else hosts, as a launcher's agent does; None has rank 0 host it.
        timeout: seconds until ranks that still run are killed.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_PATCHES_")}
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "MORE_PORTS": f"{free_port()},{free_port()}",  # for groups that are initialized again
        "WORLD_SIZE": str(ranks),
    }
    if port:
        common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    started = []
    for rank in range(ranks):
        chosen = python if isinstance(python, str) else python.get(rank, sys.executable)
        environment = {
            **inherited,
            **common,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            **(settings or {}),
            **((own or {}).get(rank, {})),
        }
        started.append(
            subprocess.Popen(
                [chosen, str(worker), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    for process in started:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            errors += f"\nkilled after {timeout} s"
        ended.append(Ended.of(process.returncode, output, errors))
    return ended


def run_forked(
    forkserver: ForkServer,
    out: Path,
    worker: Path,
    arguments: Sequence[str] = (),
    ranks: int = 2,
    *,
    settings: Mapping[str, str] | None = None,
    own: Mapping[int, Mapping[str, str]] | None = None,
    store_of_a_launcher: bool = False,
) -> list[Ended]:
    """The same on forks of a process that has imported torch, for what does not depend on how a process starts.

    Args:
        forkserver: the session's fork servers.
        out: an empty folder; made if it is not there.
        worker: the script.
        arguments: its arguments.
        ranks: how many.
        settings: variables of every rank.
        own: more variables of single ranks.
        store_of_a_launcher: whether the store is in a process of its own; otherwise rank 0 hosts it.
    """
    out.mkdir(exist_ok=True)
    common = {"MORE_PORTS": f"{free_port()},{free_port()}", **(settings or {})}
    if not store_of_a_launcher:
        common |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    given = (str(worker), json.dumps(dict(own or {}), default=dict), *arguments)
    reports = forkserver.run("tests.harness.forked_rank", given, out, TORCH, ranks=ranks, settings=common)
    return [Ended.of(**report) for report in reports]


@contextmanager
def store_of_a_launcher() -> Iterator[int]:
    """The port of a store in a process of its own, as torchrun's agent hosts one: no rank's death ends it."""
    port = free_port()
    code = (
        f"import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', {port}, None, True, wait_for_workers=False);"
        "print('ready', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], text=True, stdin=pipe, stdout=pipe) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        try:
            yield port
        finally:
            host.kill()
