"""``skyrl-accumulated-requests``: two requests before a step, on SkyRL's real workers."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import SKYRL_WORKERS, skyrl

RULE_COVERAGE = {
    "minimal scope": "because nothing is applied: an advice",
    "no side effects": "because nothing is applied: an advice",
    "backward compatible": "test_the_last_request_is_all_that_counts",
    "no new blocking": "because nothing is applied: an advice",
}
WORKER = "tests.patches.skyrl.accumulated_requests_ranks"
RELEASES = ["0.3", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.1", "0.2"))]


@pytest.fixture(scope="module", params=RELEASES)
def report(run_ranks, request):
    (found,) = run_ranks(WORKER, levels=(*skyrl(request.param), SKYRL_WORKERS), ranks=1, TORCHDYNAMO_DISABLE="1")
    assert (found["version"], found["status"]) == (f"{request.param}.0", "advice")
    assert found["before"] == found["after"] == found["reverted"]
    return found


def test_the_last_request_is_all_that_counts(report):
    """What is advised, FSDP, has the sum."""
    found = report["before"]
    assert found["megatron"]["sum"] > 0.1
    assert found["megatron"]["last"] == 0
    assert found["fsdp"]["sum"] < 1e-6
    assert found["fsdp"]["last"] > 0.1
