"""transformers-moe-aux-loss: one step of small mixtures of experts by the real Trainer, on two gloo ranks.

The yardstick: cross-entropy over all ranks' tokens plus the coefficient times the mean auxiliary loss, in float64.
"""

from __future__ import annotations

import pytest

from tests.harness.warm import beside

WORKER = "tests.patches.transformers.moe_aux_loss_ranks"
WRONG = ("Qwen3-MoE", "JetMoE", "LoRA", "chunked", "evaluation")
ALONE = ("dense", "not averaged", "own loss", "label smoothing", "own forward")
#: float32 against float64.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reports(run_ranks):
    reports = run_ranks(WORKER, levels=beside(None, "trainer"))
    for report in reports:
        assert report["status"] == "applied"
    return reports


@pytest.mark.parametrize("case", [*WRONG, "bfloat16"])
def test_without_it_the_loss_has_the_auxiliary_part_twice(reports, case):
    for report in reports:
        for state in ("before", "reverted"):
            assert report[state][case]["loss"] > 1.1 * report[state][case]["wanted"]


@pytest.mark.parametrize("case", WRONG)
def test_with_it_the_loss_is_the_defined_one(reports, case):
    for report in reports:
        found = report["after"][case]
        assert found["loss"] == pytest.approx(found["wanted"], rel=TOLERANCE)
        assert found["outputs' loss"] == found["loss"]


@pytest.mark.parametrize("case", ["Qwen3-MoE", "JetMoE", "LoRA", "chunked"])
def test_with_it_gradients_are_those_of_the_definition(reports, case):
    """Of every parameter; the routers' were wrong by half and more."""
    for report in reports:
        assert len(report["after"][case]["off by"]) == len(report["after"][case]["bits"])
        before, after = (report[state][case]["off by"] for state in ("before", "after"))
        assert max(after.values()) < TOLERANCE
        if case != "LoRA":
            assert report["after"][case]["routers"] >= 1
            assert min(error for name, error in before.items() if "gate.weight" in name or "router" in name) > 0.4


def test_under_bfloat16_it_is_right_within_that(reports):
    """8 bits in the matrix products."""
    for report in reports:
        assert report["after"]["bfloat16"]["loss"] == pytest.approx(report["after"]["bfloat16"]["wanted"], rel=1e-2)


def test_what_evaluation_logs_is_the_mean_over_ranks(reports):
    mean = sum(report["after"]["evaluation"]["wanted"] for report in reports) / len(reports)
    for report in reports:
        assert report["after"]["evaluation"]["logged"] == pytest.approx(mean, rel=TOLERANCE)


@pytest.mark.parametrize("case", ALONE)
def test_where_nothing_is_multiplied_or_known_nothing_changes(reports, case):
    for report in reports:
        assert report["after"][case] == report["before"][case] == report["reverted"][case]
        assert report["after"][case]["loss"] > 0
