"""trl-online-dpo-metrics: what TRL's own Online DPO trainer logs, against float64."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.trl.online_dpo_metrics import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import TRL, beside

RULE_COVERAGE = {
    "minimal scope": "test_without_padding_the_numbers_are_the_same",
    "no side effects": "because local variables get other numbers; nothing is written to what the user holds",
    "backward compatible": "test_training_and_the_other_metrics_are_the_same",
    "no new blocking": "because it is arithmetic on one rank: no lock, no collective",
    "stay bit for bit identical": "test_training_and_the_other_metrics_are_the_same",
    "bit for bit": "test_without_padding_the_numbers_are_the_same",
    "as released": "because TestContract reads 0.10.1, which is outside of the range",
}
WORKER = "rlhf_patches.patches.trl.proofs.online_dpo_metrics_ranks"
CASES = ("OnlineDPO 2", "OnlineDPO 1", "OnlineDPO 2 equal")
#: Sums of a few float32 numbers.
ROUNDING = 1e-5


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.11.0", "trl==0.24.0", "trl==0.27.2", "trl==1.16.0", "trl==0.10.1")
    held = RULE_COVERAGE


@pytest.fixture(scope="module", params=[None, pytest.param("trl-1.16", marks=pytest.mark.exhaustive)])
def report(request, run_ranks):
    levels = beside(request.param, "trl") if request.param else TRL
    (found,) = run_ranks(WORKER, *CASES, levels=levels, ranks=1)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", CASES[:2])
def test_padding_does_not_count(report, case):
    before, after = (report[state][case] for state in ("before", "after"))
    assert len(after["lengths"]) > 1
    for name, error in after["errors"].items():
        assert error < ROUNDING < 0.02 < before["errors"][name], name


@pytest.mark.parametrize("case", CASES)
def test_training_and_the_other_metrics_are_the_same(report, case):
    before, after = (report[state][case] for state in ("before", "after"))
    assert after["gradient"] == before["gradient"]
    assert after["others"] == before["others"]
    assert {"loss", "rewards/margins", "logps/chosen"} <= after["others"].keys()


def test_without_padding_the_numbers_are_the_same(report):
    before, after = (report[state][CASES[2]] for state in ("before", "after"))
    assert len(after["lengths"]) == 1
    assert after == before
    assert max(after["errors"].values()) < ROUNDING


def test_how_often_it_was_met(report):
    """In the micro-batches with completions of several lengths."""
    assert (report["reached"]["asked"], report["reached"]["held"]) == (5, 3)


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"][CASES[0]] == report["before"][CASES[0]]
