"""Real training on two ranks, in processes of its own, for tests and nothing else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).parents[1] / "support"
Reports = list[dict[str, Any]]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reports]:
    """Run tests/support/rollout_training.py on two gloo ranks; returns each rank's report.

    Runs with the same arguments happen once a session: they are deterministic.
    """
    done: dict[object, Reports] = {}

    def run(*arguments: str, python: str = sys.executable, **settings: str) -> Reports:
        key = (arguments, python, tuple(sorted(settings.items())))
        if key not in done:
            done[key] = _run(arguments, python, settings, tmp_path_factory.mktemp("training"))
        return done[key]

    return run


def _run(arguments: tuple[str, ...], python: str, settings: dict[str, str], out: Path) -> Reports:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # fmt: off
    command = [
        python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
        "--master-port", str(port), str(SUPPORT / "rollout_training.py"), "--out", str(out), *arguments,
    ]
    # fmt: on
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_PATCHES_")}
    done = subprocess.run(command, env={**environment, **settings}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def assert_same_training(reports: Reports, reference: Reports) -> None:
    """Losses, gradient norms and every parameter at the end are the same bit for bit, on every rank."""
    for report, expected in zip(reports, reference, strict=True):
        assert report["failure"] is None
        assert report["losses"] == expected["losses"]
        assert [step["grad_norm"] for step in report["steps"]] == [step["grad_norm"] for step in expected["steps"]]
        assert report["final_state"] == expected["final_state"]
    losses = [float.fromhex(loss) for loss in reports[0]["losses"]["actor"]]
    assert losses[-1] < losses[0], "it has learned something, so equal losses mean something"


def assert_failure(reports: Reports, exception: str, message: str, rollout: int, doing: str = "train") -> None:
    """Every rank failed in the same way at the same place."""
    for report in reports:
        failure = report["failure"]
        assert failure is not None, "it was expected to fail, and did not"
        assert (failure["exception"], failure["rollout"], failure["doing"]) == (exception, rollout, doing), failure
        assert message in failure["message"]
