"""``skyrl-step-wise-advantages``: SkyRL's own trainer on steps, against the formulas in float64."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.skyrl.proofs.step_wise_advantages import expected, wrong
from tests.harness.forkserver import skyrl_trainer

RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "because it hands another mask to the estimator, and multiplies what that returns",
    "backward compatible": "test_all_others_stay",
    "known": "test_all_others_stay",
    "no new blocking": "because it runs in the trainer's process; no lock, no collective",
    "bit for bit": ("test_all_others_stay", "test_last_steps_stay"),
    "as released": "test_all_others_stay",
}
WORKER = "tests.patches.skyrl.step_wise_advantages_own_ranks"
WRONG = {"grpo": "grpo", "rloo": "rloo", "grpo, padded": "grpo"}
RIGHT = ("not step-wise", "shorter steps", "gae", "reinforce++", "no last step", "own", "own as grpo")


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, levels=skyrl_trainer("0.1"), ranks=1, TORCHDYNAMO_DISABLE="1")
    assert (found["version"], found["status"]) == ("0.1.0", "applied")
    return found


@pytest.mark.parametrize("case", WRONG)
def test_each_token_has_the_advantage_of_its_trajectory(report, case):
    wanted = expected(report["after"]["given"], WRONG[case])
    assert sum(map(len, wanted)) == 33
    assert wrong(report["before"][case], wanted) == 7  # 5 and 2 tokens of the first trajectory's steps
    assert wrong(report["after"][case], wanted) == 0
    assert report["before"]["beside"][case] > 0 == report["after"]["beside"][case]


def test_last_steps_stay(report):
    lasts = [sum(len(steps) for steps in report["after"]["given"]["steps"][: number + 1]) - 1 for number in range(4)]
    for case in WRONG:
        for last in lasts:
            assert report["after"][case][last] == report["before"][case][last]


@pytest.mark.parametrize("case", RIGHT)
def test_all_others_stay(report, case):
    assert report["after"][case] == report["before"][case]


def test_after_revert_it_is_as_released(report):
    assert report["reverted"]["grpo"] == report["before"]["grpo"]


def test_the_condition(report):
    reached = report["reached"]
    assert (reached["held"], reached["calls"]) == (len(WRONG), len(WRONG) + len(RIGHT))
    assert reached["asked"] == reached["calls"]
