"""``openrlhf-watch-rollouts``: OpenRLHF's own maker of experiences, on rollouts of the policy, and of another one."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.openrlhf.watch_rollouts import WATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import beside
from tests.patches.openrlhf.watch_rollouts_cases import CASES

RULE_COVERAGE = {
    "minimal scope": "test_nothing_is_said_of_a_right_run",
    "no side effects": "test_results_are_the_same",
    "backward compatible": ("test_results_are_the_same", "test_nothing_is_said_of_a_right_run"),
    "no new blocking": "because it reads tensors that are in the host's memory, and asks where they are first",
}
WRONG = "lost weights"
RIGHT = [name for name, case in CASES.items() if name != WRONG and case.get("watched", True)]


class TestContract(PatchContract):
    patch = WATCH
    releases = ("openrlhf==0.8.1", "openrlhf==0.8.9", "openrlhf==0.11.2", "openrlhf==0.8.0")
    open_range = "it looks at whatever takes the same arguments, and says nothing where it finds something else"
    held = RULE_COVERAGE


@pytest.fixture(scope="module", params=["0.11.2", "0.8.9", pytest.param("0.10.2", marks=pytest.mark.exhaustive)])
def report(request, run_ranks):
    levels = beside(f"openrlhf-{request.param}", "openrlhf")
    (found,) = run_ranks("tests.patches.openrlhf.watch_rollouts_ranks", levels=levels, ranks=1)
    return found


def test_it_says_once_what_is_wrong(report):
    assert report[WRONG]["status"] == "applied", report[WRONG]["reason"]
    (line,) = report[WRONG]["said"]
    first, second, third = report[WRONG]["differences"]
    assert first < 0.03
    assert line.startswith(f"openrlhf-watch-rollouts: trainer and engine differ by {second:.3g} nats per sampled token")
    assert "Unrepaired known bugs with this sign: openrlhf-own-sampling; " in line
    found = report[WRONG]["observed"]["log-probabilities"]
    assert (found["worst"], found["values"]) == (pytest.approx(max(second, third)), 3)
    assert found["warning"].startswith("trainer and engine differ by")


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_said_of_a_right_run(report, case):
    assert report[case]["status"] == "applied", report[case]["reason"]
    assert report[case]["said"] == []
    assert bool(report[case]["observed"]) is (case in {"right", "limit set"})


def test_results_are_the_same(report):
    """To the bit."""
    assert report["right"]["kept"] == report["not watched"]["kept"]
    assert report[WRONG]["kept"] == report["lost, not watched"]["kept"]
    assert report["not watched"]["status"] != "applied"
