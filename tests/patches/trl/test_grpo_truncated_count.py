"""``trl-grpo-truncated-count``: gradients of TRL's own GRPO trainer against DAPO's formula, some completions truncated.

grpo_truncated_count_ranks.py trains on one rank and on two, in several micro-batches, with trl-grpo-dapo-scale as well.
"""

from __future__ import annotations

import os

import pytest

from rlhf_patches.patches.trl.grpo_truncated_count import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, Level, trl_beside
from tests.harness.side_by_side import folder

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same_bit_for_bit",
    "no side effects": "because a local variable gets another number; nothing is written to what the user holds",
    "backward compatible": (
        "test_what_was_right_is_the_same_bit_for_bit",
        "test_where_all_are_truncated_the_loss_stays_0",
        "test_what_is_one_s_own_is_left_alone",
    ),
    "no new blocking": "test_on_two_ranks",
    "Without `mask_truncated_completions` nothing changes": "test_what_was_right_is_the_same_bit_for_bit",
    "bit for bit": "test_what_was_right_is_the_same_bit_for_bit",
    "the loss stays 0": "test_where_all_are_truncated_the_loss_stays_0",
    "both factors are right": "test_with_the_other_factor_of_the_loss",
    "The patch does not change": "test_what_is_one_s_own_is_left_alone",
    "a hook of a parameter's gradient": (
        "test_online_dpo_accumulation.py::test_gradients_that_a_user_may_divide_later_are_left_alone"
    ),
    "stay excluded, as before": "test_what_was_right_is_the_same_bit_for_bit",
}
WORKER = "rlhf_patches.patches.trl.proofs.grpo_truncated_count_ranks"
HALF = "masked, half a generation"
WRONG = ("masked", "masked, an environment")
SAME = ("none is truncated", "not masked", "masked, grpo")
#: Forward and backward in float32, of a model of one layer; seen are 4e-7.
ROUNDING = 1e-5
BESIDE = trl_beside("trl-1.5")


class TestContract(PatchContract):
    patch = PATCH
    releases = (*(f"trl=={name}" for name in ("0.22.0", "0.25.1", "0.26.0", "0.27.2", "0.28.0", "1.8.0")), "trl==1.9.0")
    held = RULE_COVERAGE


@pytest.fixture
def report(run_ranks):
    (found,) = run_ranks(
        WORKER, *WRONG, HALF, *SAME, "all are truncated", levels=BESIDE, ranks=1, ACCELERATE_USE_CPU="true"
    )
    assert found[PATCH.name] == found["trl-grpo-dapo-scale"] == ["1.5.1", "applied"]
    return found


def is_repaired(found, case):
    assert found["before"][case]["factor"] < 0.8, "of its size"
    assert found["before"][case]["error"] == pytest.approx(1 - found["before"][case]["factor"], rel=1e-3)
    assert found["after"][case]["error"] < ROUNDING
    assert found["after"][case]["seen"] == found["before"][case]["seen"], "tokens of the log are those that were seen"


@pytest.mark.parametrize("case", WRONG)
def test_the_mean_is_over_the_tokens_that_are_trained(report, case):
    is_repaired(report, case)
    before, after = (report[state][case]["evaluated"] for state in ("before", "after"))
    assert abs(after) > 1.2 * abs(before), "evaluated it had the same divisor"


def test_with_the_other_factor_of_the_loss(report):
    """An optimizer step is half a generation: either patch repairs its own factor."""
    factors = {state: report[state][HALF]["factor"] for state in ("before", "after", "both", "scale")}
    assert factors["both"] == pytest.approx(1, rel=ROUNDING)
    assert report["both"][HALF]["error"] < ROUNDING
    assert factors["after"] == pytest.approx(0.5, rel=ROUNDING)
    assert factors["before"] == pytest.approx(0.5 * factors["scale"], rel=ROUNDING)
    assert factors["scale"] < 0.8


@pytest.mark.parametrize("case", SAME)
def test_what_was_right_is_the_same_bit_for_bit(report, case):
    assert report["after"][case] == report["before"][case]


def test_where_all_are_truncated_the_loss_stays_0(report):
    for state in ("before", "after"):
        found = report[state]["all are truncated"]
        assert (found["norm"], found["losses"], found["evaluated"], found["tokens"]) == (0, [0], 0, 0)


def test_what_is_one_s_own_is_left_alone(run_ranks):
    """A subclass may have left the truncated tokens out itself, as these have."""
    (found,) = run_ranks(
        "tests.patches.trl.grpo_truncated_count_own_ranks",
        levels=BESIDE,
        ranks=1,
        ACCELERATE_USE_CPU="true",
    )
    assert found["status"] == "applied"
    assert found["after"] == found["before"]
    assert found["reached"]["held"] == 0
    for name, each in found["after"].items():
        assert each["error"] < ROUNDING or name == "Generates", name  # whose number is another one


def test_reverted_it_is_trl_s_own_again(report):
    assert report["reverted"]["masked"] == report["before"]["masked"]


def test_on_two_ranks(run_ranks):
    """The tokens of both count, of which each has another number."""
    reports = run_ranks(WORKER, "masked", levels=BESIDE, ACCELERATE_USE_CPU="true")
    for found in reports:
        is_repaired(found, "masked")
    assert reports[0]["after"]["masked"]["gradient"] == reports[1]["after"]["masked"]["gradient"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("version", "more"),
    [("0.22.0", "transformers-4.57"), ("0.25.1", "transformers-4.57"), ("0.27.2", "transformers-4.57"), ("1.8.0", "")],
)
def test_other_releases(run_ranks, version, more):
    """As far as they were read; the newest transformers that they work with."""
    folders = [unpacked.folders(f"trl=={version}"), *([str(folder(more))] if more else [])]
    level = Level("tests.harness.loading:transformers_alone", os.pathsep.join(folders))
    (found,) = run_ranks(WORKER, "masked", "not masked", levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert found[PATCH.name] == [version, "applied"]
    is_repaired(found, "masked")
    assert found["after"]["not masked"] == found["before"]["not masked"]
