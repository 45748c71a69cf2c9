"""What tests expect of the reports of a training run on two ranks."""

from __future__ import annotations

from tests.harness.torchrun import Reports


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
