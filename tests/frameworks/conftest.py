"""Real training on two ranks, in processes of its own, for tests and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from launch import WORKER, Reports, launch
from side_by_side import on_path


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reports]:
    """Run tests/support/rollout_training.py on two gloo ranks; returns each rank's report.

    Runs with the same arguments happen once a session: they are deterministic.
    """
    done: dict[object, Reports] = {}

    def run(*arguments: str, python: str = sys.executable, **settings: str) -> Reports:
        key = (arguments, python, tuple(sorted(settings.items())))
        if key not in done:
            done[key] = launch(arguments, tmp_path_factory.mktemp("training"), python, settings)
        return done[key]

    return run


@pytest.fixture(scope="session")
def skyrl_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reports]:
    """Run a worker of tests/support on two gloo ranks with a release of SkyRL; returns each rank's report."""
    done: dict[object, Reports] = {}

    def run(release: str, *arguments: str, worker: str = "skyrl_ranks.py", **settings: str) -> Reports:
        key = (release, arguments, worker, tuple(sorted(settings.items())))
        if key not in done:
            # What SkyRL compiles is one product and sum; compiling it would take a GPU, or a minute.
            environment = {**on_path(f"skyrl-{release}"), "TORCHDYNAMO_DISABLE": "1", **settings}
            out = tmp_path_factory.mktemp("skyrl")
            done[key] = launch(arguments, out, settings=environment, worker=WORKER.with_name(worker))
        return done[key]

    return run
