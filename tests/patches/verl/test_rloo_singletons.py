"""verl-rloo-singletons on verl's real estimators (rloo_singletons_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.verl.proofs import rloo_singletons_ranks

WORKER = rloo_singletons_ranks.__name__
CASES = rloo_singletons_ranks.CASES
RULE_COVERAGE = {
    "minimal scope": "test_responses_with_others_have_the_same_bits",
    "no side effects": "because it computes a new tensor of the rewards",
    "backward compatible": "test_responses_with_others_have_the_same_bits",
    "no new blocking": "because it computes on one process's tensors; no lock, no collective",
    "of all other responses are bitwise identical": "test_responses_with_others_have_the_same_bits",
}
# float32 against float64, numbers up to 3: seen up to 2e-7.
TOLERANCE = 1e-6


@pytest.fixture(
    scope="module", params=["0.9", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.8", "0.6"))]
)
def report(reported, request):
    return reported(WORKER, request.param)


@pytest.mark.parametrize("case", CASES)
def test_without_it_who_is_alone_is_left_out(report, case):
    found = report["before"]["rloo_vectorized"][case]
    assert (found["error"] < TOLERANCE) if case == "groups" else (found["error"] >= 1)
    if case == "all alone":
        assert not any(map(any, found["found"]))


@pytest.mark.parametrize("case", CASES)
def test_with_it_both_estimators_are_the_definition(report, case):
    for estimator in ("rloo", "rloo_vectorized"):
        assert report["after"][estimator][case]["error"] < TOLERANCE
        if case == "groups" or estimator == "rloo":
            assert report["after"][estimator][case] == report["before"][estimator][case]


def test_responses_with_others_have_the_same_bits(report):
    """In each type, with the sign of a zero."""
    assert len(report["after"]["types"]) == 24
    assert report["after"]["types"] == report["before"]["types"]


def test_it_reports_the_batches_in_which_one_is_alone(report):
    types = len(report["after"]["types"])
    calls = len(CASES) + types
    assert report["reached"] == {"calls": calls, "asked": calls, "held": 2 + types // 2}


def test_reverted_it_is_verls_again(report):
    assert report["reverted"] == report["before"]
