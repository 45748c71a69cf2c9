"""``trl-grpo-dapo-scale``: gradients of TRL's own GRPO trainer against DAPO's formula (grpo_dapo_scale_ranks.py)."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import TORCH, TRL, Level
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": ("test_what_was_right_is_the_same_bit_for_bit", "test_evaluation_is_the_same"),
    "no side effects": "because it multiplies a number of upstream's, read from the trainer and its arguments",
    "backward compatible": (
        "test_a_loss_outside_train_is_trl_s_own",
        "test_evaluation_is_the_same",
        "test_what_is_one_s_own_is_left_alone",
    ),
    "no new blocking": "because it computes on one rank's numbers; no lock, no collective",
    "The patch does not change": "test_what_is_one_s_own_is_left_alone",
    "a hook of a parameter's gradient": (
        "test_online_dpo_accumulation.py::test_gradients_that_a_user_may_divide_later_are_left_alone"
    ),
    "bit for bit": ("test_what_was_right_is_the_same_bit_for_bit", "test_evaluation_is_the_same"),
}
WORKER = "rlhf_patches.patches.trl.proofs.grpo_dapo_scale_ranks"
FACTORS = {"4 and 2": 2 / 4, "1 and 4": 4 / 1, "4 and 2, cispo": 2 / 4}
"""The gradient's factor without the patch; the key has the micro-batches of a generation and of an optimizer step."""
SAME = ("2 and 2", "4 and 2, grpo")
ROUNDING = 1e-5
"""Forward and backward in float32, of a model of one layer: 2**-24 for each of some hundred operations at most."""


@pytest.fixture(scope="module")
def report(run_ranks):
    levels = (*TORCH, Level("tests.harness.loading:trl", str(folder("trl-1.5"))))
    (report,) = run_ranks(WORKER, levels=levels, ranks=1)
    assert (report["version"], report["status"]) == ("1.5.1", "applied")
    return report


@pytest.mark.parametrize("case", FACTORS)
def test_without_it_the_gradient_has_another_size(report, case):
    for state in ("before", "reverted"):
        assert report[state][case]["factor"] == pytest.approx(FACTORS[case], rel=ROUNDING)
        assert report[state][case]["error"] == pytest.approx(abs(FACTORS[case] - 1), rel=1e-3)


@pytest.mark.parametrize("case", FACTORS)
def test_with_it_it_is_that_of_the_formula(report, case):
    assert report["after"][case]["error"] < ROUNDING
    assert len(report["after"][case]["lengths"]) > 1, "completions of one length would show less"
    assert report["after"][case]["steps"] * (4 if case == "1 and 4" else 2) == 4, "four micro-batches"


@pytest.mark.parametrize("case", SAME)
def test_what_was_right_is_the_same_bit_for_bit(report, case):
    assert report["after"][case] == report["before"][case]


def test_equal_numbers_were_right(report):
    assert report["before"]["2 and 2"]["error"] < ROUNDING


@pytest.mark.parametrize("case", [*FACTORS, *SAME])
def test_evaluation_is_the_same(report, case):
    assert report["after"][case]["evaluated"] == report["before"][case]["evaluated"]


@pytest.mark.parametrize("case", FACTORS)
def test_a_loss_outside_train_is_trl_s_own(report, case):
    """Where nothing has told how many micro-batches an optimizer step has."""
    before = report["before"][case]["outside train()"]
    assert report["after"][case]["outside train()"] == before != 0
    assert isinstance(before, float)


def test_what_is_one_s_own_is_left_alone(run_ranks):
    """A subclass may have repaired it, as these have."""
    levels = (*TORCH, Level("tests.harness.loading:trl", str(folder("trl-1.5"))))
    (found,) = run_ranks("tests.patches.trl.grpo_dapo_scale_own_ranks", levels=levels, ranks=1)
    assert found["status"] == "applied"
    assert found["after"] == found["before"]
    assert found["reached"]["held"] == 0
    for each in found["after"].values():
        assert each["error"] < ROUNDING


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"] == report["before"]


@pytest.mark.exhaustive
def test_a_release_that_is_repaired_is_left_alone(run_ranks):
    """The installed one."""
    (report,) = run_ranks(WORKER, levels=TRL, ranks=1)
    assert report["status"] == "unaffected"
    assert report["after"] == report["before"]
    for case in FACTORS:
        assert report["after"][case]["error"] < ROUNDING
