"""verl-gdpo-whitening on verl's real estimator (gdpo_whitening_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.verl.proofs import gdpo_whitening_ranks

WORKER = gdpo_whitening_ranks.__name__
CASES = gdpo_whitening_ranks.CASES
RULE_COVERAGE = {
    "minimal scope": "because each of its calls has the bug: with one length, too, n - 1 is another number",
    "no side effects": "because it computes a new tensor of the advantages",
    "backward compatible": "test_masks_of_every_type",
    "no new blocking": "because it computes on one process's tensors; no lock, no collective",
    "by the difference between n and n - 1": "test_without_it_lengths_count",
}
# float32 against float64, numbers up to 3: seen up to 5e-7.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module", params=["0.9", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.8", "0.7"))]
)
def report(reported, request):
    return reported(WORKER, request.param)


@pytest.mark.parametrize("case", CASES)
def test_without_it_lengths_count(report, case):
    """With one length only n - 1 is another number: 55 for 56 tokens, 7 for 8 responses; sqrt(7 * 7 / 55) = 0.944."""
    found = report["before"][case]
    if case == "one response":
        assert found["error"] < 0.01  # 0, but for rounding times 1 / sqrt(1e-8)
    elif case == "one length":
        assert found["mean"] == pytest.approx(0, abs=TOLERANCE)
        assert 1 / found["deviation"] == pytest.approx(0.9438, abs=1e-3)
    else:
        assert found["error"] > 0.1


@pytest.mark.parametrize("case", CASES)
def test_with_it_they_do_not(report, case):
    found = report["after"][case]
    assert found["error"] < TOLERANCE
    assert found["mean"] == pytest.approx(0, abs=TOLERANCE)
    assert found["deviation"] == (None if case == "one response" else pytest.approx(1, rel=TOLERANCE))
    assert found["returns"]


def test_masks_of_every_type(report):
    """Of booleans and of floats the advantages are those of integers, as they are without it."""
    for state in ("before", "after"):
        assert report[state]["lengths"]["types"] == [True, True]


def test_it_reports_lengths_that_differ(report):
    """With one length it is unknown."""
    calls = len(CASES) + 2  # of other masks
    assert report["reached"] == {"calls": calls, "asked": calls - 2, "held": calls - 2}


def test_reverted_it_is_verls_again(report):
    assert report["reverted"] == report["before"]
