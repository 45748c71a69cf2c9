"""verl-reinforce-plus-plus-turns on verl's real estimator (reinforce_plus_plus_turns_ranks.py)."""

from __future__ import annotations

import pytest

from tests.patches.verl import reinforce_plus_plus_turns_ranks

WORKER = reinforce_plus_plus_turns_ranks.__name__
CASES = reinforce_plus_plus_turns_ranks.CASES
RIGHT = [name for name in CASES if name.startswith("one turn")]
# float32 against float64, numbers up to 2 and sums of 12: seen up to 4e-7.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module", params=["0.8", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("0.7", "0.6"))]
)
def report(reported, request):
    return reported(WORKER, request.param)


@pytest.mark.parametrize("case", CASES)
def test_without_it_only_the_last_turn_has_the_reward(report, case):
    for found in report["before"][case].values():
        assert (found["error"] < TOLERANCE) if case in RIGHT else (found["error"] > 0.4)


@pytest.mark.parametrize("case", CASES)
def test_with_it_every_turn_has_it(report, case):
    for found in report["after"][case].values():
        assert found["error"] < TOLERANCE
    if case in RIGHT:
        assert report["after"][case] == report["before"][case]


def test_reverted_it_is_verls_again(report):
    assert report["reverted"] == report["before"]
