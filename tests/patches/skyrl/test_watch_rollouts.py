"""``skyrl-watch-rollouts``: SkyRL's own trainer, on rollouts of the policy that is trained, and of another one."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.skyrl.watch_rollouts import WATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import skyrl_trainer
from tests.patches.skyrl.watch_rollouts_cases import CASES

RULE_COVERAGE = {
    "minimal scope": "test_nothing_is_said_of_a_right_run",
    "no side effects": "test_results_are_the_same",
    "backward compatible": ("test_results_are_the_same", "test_nothing_is_said_of_a_right_run"),
    "no new blocking": "because it reads a number that SkyRL has made of a tensor already",
}
WRONG = {"lost weights": 2, "raw log-probabilities": 1}
"""And the step at which it is said."""
RIGHT = [name for name, case in CASES.items() if name not in WRONG and case.get("watched", True)]


class TestContract(PatchContract):
    patch = WATCH
    releases = ("skyrl==0.1.0", "skyrl==0.4.0", "skyrl==0.0.1")
    open_range = "it looks at whatever takes the same arguments, and says nothing where it finds something else"
    held = RULE_COVERAGE


@pytest.fixture(
    scope="module",
    params=["0.4", "0.1", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("0.2", "0.3"))],
)
def report(request, run_ranks):
    levels = skyrl_trainer(request.param)
    (found,) = run_ranks("tests.patches.skyrl.watch_rollouts_ranks", levels=levels, ranks=1)
    return found


@pytest.mark.parametrize("case", WRONG)
def test_it_says_once_what_is_wrong(report, case):
    assert report[case]["status"] == "applied", report[case]["reason"]
    (line,) = report[case]["said"]
    step, differences = WRONG[case], report[case]["differences"]
    value = f"{differences[step - 1]:.3g} nats per sampled token at step {step} (limit 0.1)"
    assert line.startswith(f"skyrl-watch-rollouts: trainer and engine differ by {value}")
    assert "Unrepaired known bugs with this sign: skyrl-rollout-temperature; " in line
    assert report[case]["observed"]["log-probabilities"]["worst"] == pytest.approx(max(differences))


@pytest.mark.parametrize("case", RIGHT)
def test_nothing_is_said_of_a_right_run(report, case):
    assert report[case]["status"] == "applied", report[case]["reason"]
    assert report[case]["said"] == []
    assert bool(report[case]["observed"]) is (case in {"right", "limit set"})


def test_results_are_the_same(report):
    """To the bit."""
    assert report["right"]["kept"] == report["not watched"]["kept"]
    assert report["lost weights"]["kept"] == report["lost, not watched"]["kept"]
    assert report["not watched"]["status"] != "applied"
