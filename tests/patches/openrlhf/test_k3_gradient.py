"""OpenRLHF's k3 estimate of the KL and its gradient, where the exponential overflows (k3_gradient_ranks.py)."""

from __future__ import annotations

import math

import pytest

from tests.harness.forkserver import beside

BOUND = 10.0
FIXED = "0.11.2"
RULE_COVERAGE = {
    "minimal scope": "test_as_released_the_gradient_is_nan_and_nothing_else_changes",
    "no side effects": "because it computes a new tensor of two that it only reads",
    "backward compatible": (
        "test_estimate_and_gradient_are_those_of_the_formula",
        "test_without_any_probability_under_the_policy_it_is_the_bound",
    ),
    "no new blocking": "because it computes on one rank's tensors; no lock, no collective",
    "that were not NaN are bitwise identical": "test_as_released_the_gradient_is_nan_and_nothing_else_changes",
    "there it is now the clamp's limit": "test_without_any_probability_under_the_policy_it_is_the_bound",
}
RELEASES = ["0.10.2", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.8.9", "0.11.1"))]


def run(run_ranks, release):
    worker = "rlhf_patches.patches.openrlhf.proofs.k3_gradient_ranks"
    (found,) = run_ranks(worker, levels=beside(f"openrlhf-{release}", "openrlhf"), ranks=1)
    assert found["version"] == release
    return found


@pytest.fixture(scope="module", params=RELEASES)
def report(run_ranks, request):
    found = run(run_ranks, request.param)
    assert found["status"] == "applied"
    return found


def check(found, differences):
    """Shao et al., arXiv:2402.03300, equation 4, bounded, in float64; the last token is masked."""
    tokens = len(differences) - 1
    for token, difference in enumerate(differences):
        value = math.exp(min(-difference, 700.0)) - 1 + difference
        slope = 0.0 if value > BOUND or token == tokens else (1 - math.exp(-difference)) / tokens
        # Sums of float32 numbers up to 95, whose last digit is 4e-6 there and cancels in the smallest.
        assert found["estimates"][token] == pytest.approx(min(value, BOUND), abs=4e-6)
        assert found["gradient"][token] == pytest.approx(slope, abs=1e-6)


def test_estimate_and_gradient_are_those_of_the_formula(report):
    check(report["after"]["k3"], report["after"]["differences"])


def test_as_released_the_gradient_is_nan_and_nothing_else_changes(report):
    before, after = report["before"]["k3"], report["after"]["k3"]
    assert str(before["estimates"]) == str(after["estimates"])  # with the sign of a zero
    assert before["gradient"][-2:] == ["nan", "nan"]
    assert str(before["gradient"][:-2]) == str(after["gradient"][:-2])
    for other in report["before"].keys() - {"k3", "infinite"}:
        assert report["before"][other] == report["after"][other]
    assert report["reverted"] == report["before"]


def test_without_any_probability_under_the_policy_it_is_the_bound(report):
    before, after = report["before"]["infinite"], report["after"]["infinite"]
    assert {case for case in before if before[case] != after[case]} <= {"-inf and -1.0", "-inf and -inf"}
    assert before["-inf and -inf"][0] == after["-inf and -inf"][0] == "nan"
    assert before["-inf and -1.0"] == ["nan", "nan"]
    assert list(map(float, after["-inf and -1.0"])) == [BOUND, 0.0]


@pytest.mark.exhaustive
def test_the_release_with_the_repair_gives_the_same(report, run_ranks):
    found = run(run_ranks, FIXED)
    assert found["status"] == "unaffected"
    assert found["before"]["k3"] == report["after"]["k3"]
