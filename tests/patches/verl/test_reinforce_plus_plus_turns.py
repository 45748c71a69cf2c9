"""verl-reinforce-plus-plus-turns on verl's real estimator (reinforce_plus_plus_turns_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.verl.proofs import reinforce_plus_plus_turns_ranks

WORKER = reinforce_plus_plus_turns_ranks.__name__
CASES = reinforce_plus_plus_turns_ranks.CASES
RULE_COVERAGE = {
    "minimal scope": "test_where_the_bug_is_not_results_have_the_same_bits",
    "no side effects": "test_with_it_every_turn_has_it",
    "backward compatible": "test_where_the_bug_is_not_results_have_the_same_bits",
    "no new blocking": "because it computes on one process's tensors; no lock, no collective",
    "The patch does not change": "test_with_it_every_turn_has_it",
    "Trajectories of one turn are not affected": "test_where_the_bug_is_not_results_have_the_same_bits",
}
# float32 against float64, numbers up to 2 and sums of 12: seen up to 4e-7.
TOLERANCE = 1e-5


def wrong(case, release):
    """As released: since 0.9 only where the outcome's reward is on a tool's token."""
    return case.startswith("ends" if release == "0.9" else ("ends", "turns"))


@pytest.fixture(
    scope="module",
    params=["0.8", "0.9", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.7", "0.6"))],
)
def release(request):
    return request.param


@pytest.fixture(scope="module")
def report(reported, release):
    return reported(WORKER, release)


@pytest.mark.parametrize("case", CASES)
def test_without_it_only_the_last_turn_has_the_reward(report, case, release):
    if "failed" in report["before"][case]:
        assert (release, case) == ("0.9", "turns, mask of booleans")
        return
    for found in report["before"][case].values():
        assert (found["error"] > 0.4) if wrong(case, release) else (found["error"] < TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_with_it_every_turn_has_it(report, case, release):
    if "failed" in report["before"][case]:
        assert report["after"][case] == report["before"][case]
        return
    for found in report["after"][case].values():
        assert found["error"] < TOLERANCE
    if not wrong(case, release):
        assert report["after"][case] == report["before"][case]


def test_where_the_bug_is_not_results_have_the_same_bits(report, release):
    """Rewards of every type: half precision stays what it is, and so does gamma in float64."""
    for case, before in report["before"]["types"].items():
        if release == "0.9" or case.startswith("one turn"):
            assert report["after"]["types"][case] == before


def test_reverted_it_is_verls_again(report):
    assert report["reverted"] == report["before"]
