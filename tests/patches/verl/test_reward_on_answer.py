"""verl-reward-on-answer on verl's real estimators (reward_on_answer_ranks.py)."""

from __future__ import annotations

import pytest

from tests.patches.verl.reward_on_answer_ranks import CASES, ESTIMATORS, WRONG

WORKER = "tests.patches.verl.reward_on_answer_ranks"
OF_TURNS = ESTIMATORS[:2]
RULE_COVERAGE = {
    "minimal scope": "test_where_the_bug_is_not_results_have_the_same_bits",
    "no side effects": "test_with_it_the_reward_counts",
    "backward compatible": "test_where_the_bug_is_not_results_have_the_same_bits",
    "no new blocking": "because it computes on one process's tensors; no lock, no collective",
    "results are bitwise identical": "test_where_the_bug_is_not_results_have_the_same_bits",
    "The patch does not change": "test_where_the_bug_is_not_results_have_the_same_bits",
    "nothing changes": "test_where_the_bug_is_not_results_have_the_same_bits",
}
# float32 against float64, numbers up to 4 and sums of 12: seen up to 3e-6.
TOLERANCE = 1e-5


def estimators(release):
    return ESTIMATORS if release in ("0.7", "0.8", "0.9") else OF_TURNS


@pytest.fixture(
    scope="module",
    params=["0.9", "0.7.0", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.8", "0.7", "0.6"))],
)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def report(reported, release):
    return reported(WORKER, release)


@pytest.mark.parametrize("case", CASES)
def test_without_it_the_reward_is_lost(report, case, release):
    for estimator in estimators(release):
        found = report["before"][f"{estimator}, {case}"]
        for what in ("advantages", "returns"):
            error = found[what]["error"]
            assert (error > 0.9) if case in WRONG else (error < TOLERANCE), (estimator, what)


@pytest.mark.parametrize("case", CASES)
def test_with_it_the_reward_counts(report, case, release):
    for estimator in estimators(release):
        found = report["after"][f"{estimator}, {case}"]
        for what in ("advantages", "returns"):
            assert found[what]["error"] < TOLERANCE, (estimator, what)
        assert found["rewards kept"]


def test_where_the_bug_is_not_results_have_the_same_bits(report, release):
    """Types of rewards and masks, and rows none of whose tokens counts; what raised still raises."""
    for estimator in estimators(release):
        types = report["before"][f"types of {estimator}"]
        assert len(types) == 50
        assert report["after"][f"types of {estimator}"] == types
        for case in CASES.keys() - set(WRONG):
            assert report["after"][f"{estimator}, {case}"] == report["before"][f"{estimator}, {case}"]


def test_it_reports_the_batches_with_a_reward_elsewhere(report, release):
    """And that no other batch has one; it is unknown where the mask is broadcast, or an estimator raises before."""
    of_each, types = len(estimators(release)), 50
    reached = report["reached"]
    assert reached["held"] == of_each * len(WRONG)
    assert reached["calls"] == of_each * (len(CASES) + types)
    assert reached["asked"] == of_each * (len(CASES) + types * 4 // 5)


def test_reverted_it_is_verls_again(report):
    assert report["reverted"] == report["before"]
