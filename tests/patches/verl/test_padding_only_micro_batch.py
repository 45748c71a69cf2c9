"""verl-padding-only-micro-batch on verl's real distillation loss (padding_only_micro_batch_ranks.py)."""

from __future__ import annotations

import json
import math

import pytest

from tests.harness.forkserver import Level
from tests.harness.logs import diagnosed
from tests.patches.verl.padding_only_micro_batch_ranks import CASES

WORKER = "tests.patches.verl.padding_only_micro_batch_ranks"
FULL = [case for case in CASES if case.startswith("all count")]
# float32 against float64, numbers up to 2: seen up to 1e-7.
TOLERANCE = 1e-6


RULE_COVERAGE = {
    "minimal scope": ("test_where_all_count_nothing_changes", "test_without_the_numbers_of_ppo_loss_it_is_as_released"),
    "no side effects": "test_without_the_numbers_of_ppo_loss_it_is_as_released",
    "backward compatible": "test_without_the_numbers_of_ppo_loss_it_is_as_released",
    "no new blocking": "because each rank has as many values as before, so that no rank leaves a collective out",
    "of the other micro-batches are bitwise identical": "test_where_all_count_nothing_changes",
    "only the metrics change": "test_where_all_count_nothing_changes",
}


@pytest.fixture(scope="module", params=["0.9", "0.8"])
def report(reported, request):
    return reported(WORKER, request.param, Level("tests.harness.loading:verl_distillation"))


@pytest.mark.parametrize("case", CASES)
def test_without_it_the_loss_fails_where_no_token_counts(report, case):
    found = report["before"][case]
    assert ("failed" in found) == (case not in FULL)
    if case not in FULL:
        assert "min(): Expected reduction dim to be specified for input.numel() == 0" in found["failed"]
        assert diagnosed(found["failed"]) == [("verl-padding-only-micro-batch", True)]


@pytest.mark.parametrize("case", CASES)
def test_with_it_loss_gradient_and_metrics_are_those_of_the_tokens_that_count(report, case):
    found, exact = report["after"][case]["found"], report["after"][case]["exact"]
    for key, value in exact.items():
        if key == "gradients":
            for one, other in zip(found[key], value, strict=True):
                for row, expected in zip(one, other, strict=True):
                    assert row == pytest.approx(expected, abs=TOLERANCE)
        else:
            assert found[key] == pytest.approx(value, abs=TOLERANCE), key
    if case.startswith("none at all"):
        assert (found["loss_min"], found["loss_max"]) == (math.inf, -math.inf)
        assert found["loss"] == 0


@pytest.mark.parametrize("case", FULL)
def test_where_all_count_nothing_changes(report, case):
    """But for 0.8's loss of a configuration that has no numbers yet."""
    before, after = (report[state][case]["found"] for state in ("before", "after"))
    own = ("loss", "gradients") if report["version"] == "0.8.0" else ()
    assert [key for key in before if before[key] != after[key]] == list(own)


def test_without_the_numbers_of_ppo_loss_it_is_as_released(report):
    """By itself, in each dtype, to the last bit; 0.9 wants the numbers itself."""
    before, after = (report[state]["by itself"] for state in ("before", "after"))
    assert after == before
    assert all(("KeyError" in found[0]) is report["version"].startswith("0.9") for found in after.values())


def test_it_reports_the_losses_of_another_mini_batch(report):
    """Of 0.8, each with a configuration that has no numbers yet; unknown without the numbers of ppo_loss."""
    if report["version"] != "0.8.0":
        assert "asked" not in report["reached"]
        return
    micro_batches = 4 * len(CASES)
    calls = micro_batches + len(report["after"]["by itself"])
    assert report["reached"] == {"calls": calls, "asked": micro_batches, "held": micro_batches}


def test_reverted_it_is_verls_again(report):
    without_lines = [json.dumps(report[state][case].get("found")) for state in ("before", "reverted") for case in CASES]
    assert without_lines[: len(CASES)] == without_lines[len(CASES) :]
