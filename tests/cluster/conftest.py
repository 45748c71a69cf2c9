"""A Ray cluster on this machine, started once, and drivers that connect to it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.harness import toy_slime
from tests.harness.ranks import free_port

# Of this session's cluster alone, and not the one that Ray would write into the user's home. Ray reads it once.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))

if importlib.util.find_spec("ray"):  # else tests/conftest.py skips this folder
    import ray


@pytest.fixture(scope="session")
def slime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The make-believe slime checkout that the workers import."""
    return toy_slime.write(tmp_path_factory.mktemp("slime"))


@pytest.fixture(scope="session")
def cluster(installed: Any) -> Iterator[str]:
    """The address of a cluster whose workers are of the environment with the wheel. Nobody else's is touched."""
    port = free_port()
    address = f"{ray.util.get_node_ip_address()}:{port}"
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of sockets in it have to be short
    # fmt: off
    command = [
        installed.python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2",
        f"--port={port}", f"--temp-dir={folder}",
        "--include-dashboard=false", "--include-log-monitor=false", "--no-monitor",
        "--disable-usage-stats", "--object-store-memory=100000000",
    ]
    # fmt: on
    settings = installed.environment({"RAY_prestart_worker_first_driver": "0"})  # they have no runtime environment
    with Path(folder, "start.log").open("w") as log:
        process = subprocess.Popen(command, env=settings, stdout=log, stderr=log, start_new_session=True, cwd=folder)
    try:
        _wait_for(address, process, Path(folder, "start.log"))
        yield address
    finally:
        # Not `ray stop`, which ends every Ray process of the machine.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ray itself would try for minutes to reach a cluster that has failed to start."""
    for _ in range(120):
        if "Ray runtime started" in log.read_text():
            return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise RuntimeError(f"no Ray cluster at {address}:\n{log.read_text()}")


Connect = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def connect(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Makes this process a driver of the cluster, with a runtime environment, for the length of a block."""
    monkeypatch.chdir(tmp_path)  # Ray adds a driver's working directory to the workers' path

    @contextlib.contextmanager
    def connected(runtime_env: dict[str, Any] | None) -> Iterator[None]:
        ray.init(address=cluster, runtime_env=runtime_env, log_to_driver=False, logging_level="error")
        try:
            yield
        finally:
            ray.shutdown()

    yield connected
    ray.shutdown()
