"""Real training on two ranks, in processes of its own, for tests and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from launch import Reports, launch


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
