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
