"""Ranks without a launcher: processes that may each have an interpreter, variables and arguments of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """A rank that has ended. ``said`` is the last line of its standard output, as JSON; None if there is none."""

    status: int
    said: Any
    errors: str


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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
        "MORE_PORTS": f"{free_port()},{free_port()}",  # for groups that are initialised again
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
        lines = [line for line in output.splitlines() if line.startswith(("{", "["))]
        ended.append(Ended(process.returncode, json.loads(lines[-1]) if lines else None, errors))
    return ended


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
