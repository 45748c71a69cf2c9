"""RLHF_PATCHES_OBSERVE on a real trainer: it trains bit for bit as released, and the report says what is wrong."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import beside

WORKER = "tests.patches.trl.observed_ranks"


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, levels=beside("trl-1.5", "trl"), ranks=1, ACCELERATE_USE_CPU="true")
    return found


def test_observed_it_is_as_released(report):
    assert report["observed"] == report["released"]
    assert not report["in force, observed"]
    row = report["row, observed"]
    assert row["status"] == "observed"
    # Four micro-batches, each of them with half the gradient that the formula has.
    assert row["reached"] == {
        **{"calls": 4, "asked": 4, "held": 4},
        **{"least": 0.5, "most": 0.5, "measure": "gradient x"},
    }


def test_patched_it_is_not(report):
    assert report["row, patched"]["status"] == "applied"
    assert report["in force, patched"]
    assert report["row, patched"]["reached"]["held"] == 4, "since it was applied"
    assert report["patched"] != report["released"]
