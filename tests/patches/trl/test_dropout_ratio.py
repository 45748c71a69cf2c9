"""``trl-dropout-ratio``: gradients of TRL's RLOO and GRPO with dropout, against REINFORCE's in float64."""

from __future__ import annotations

import os

import pytest

from rlhf_patches.patches.trl.dropout_ratio import PATCH
from rlhf_patches.patches.trl.proofs.dropout_ratio_ranks import CASES
from rlhf_patches.testing import PatchContract
from tests.harness import unpacked
from tests.harness.forkserver import TORCH, TRL, Level, beside
from tests.harness.side_by_side import folder
from tests.patches.trl.dropout_ratio_own_ranks import HOW

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_the_same_bit_for_bit",
    "no side effects": "because it reads the trainer, and hands over a tensor of the loss; its notes are its own",
    "backward compatible": (
        "test_what_a_user_has_changed_is_as_released",
        "test_what_was_right_is_the_same_bit_for_bit",
    ),
    "no new blocking": "test_two_ranks",
    "known": "test_what_a_user_has_changed_is_as_released",
    "bit for bit": ("test_what_was_right_is_the_same_bit_for_bit", "test_evaluation_is_the_same"),
    "outside `train()`": "test_what_a_user_has_changed_is_as_released",
    "stay as released": "test_later_steps_of_a_generation_are_as_released",
    "stays as released": "test_with_importance_weights_of_an_engine_it_is_as_released",
    "The patch does nothing if": "test_what_a_user_has_changed_is_as_released",
}
WORKER = "rlhf_patches.patches.trl.proofs.dropout_ratio_ranks"
USERS = "tests.patches.trl.dropout_ratio_own_ranks"
SAME = ("RLOO, none", "RLOO, disabled", "GRPO, equal")
LATER = ("RLOO, steps ahead", "RLOO, iterations", "RLOO, evaluated", "GRPO, steps ahead", "GRPO, iterations")
"""Of two steps, the second one has another policy than the generation."""
CORRECTED = ("engine", "engine, clipped", "engine, VESPO")
REPAIRED = ("own rewards", "engine, not corrected", "train() again")
ROUNDING = 1e-5
"""Forward and backward in float32, of a model of two layers at most; seen are 6e-7."""
exhaustive = pytest.mark.exhaustive


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==0.21.0", "trl==0.22.0", "trl==0.29.1", "trl==1.16.0")
    held = RULE_COVERAGE


def is_right(found, case):
    first = found[case]["steps"][0]["error"]
    return first < ROUNDING and not found[case]["logs"][0]["clip_ratio/region_mean"]


@pytest.fixture(scope="module", params=[pytest.param(None, id="1.14"), pytest.param("trl-1.16", marks=exhaustive)])
def report(request, run_ranks):
    levels = beside(request.param, "trl") if request.param else TRL
    (found,) = run_ranks(WORKER, levels=levels, ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case not in SAME])
def test_before_an_update_the_ratio_is_1(report, case):
    assert is_right(report["after"], case)
    assert report["before"][case]["steps"][0]["error"] > 0.05


def test_half_of_the_sequences_were_clipped(report):
    assert report["before"]["RLOO, steps ahead"]["logs"][0]["clip_ratio/region_mean"] == 0.5


@pytest.mark.parametrize("case", LATER)
def test_later_steps_of_a_generation_are_as_released(report, case):
    before, after = (report[state][case] for state in ("before", "after"))
    assert after["steps"][1] == before["steps"][1]
    assert after["steps"][0] != before["steps"][0]


def test_evaluation_is_the_same(report):
    before, after = (
        [log for log in report[state]["RLOO, evaluated"]["logs"] if "eval_loss" in log] for state in ("before", "after")
    )
    assert after == before
    assert len(after) == 2


@pytest.mark.parametrize("case", SAME)
def test_what_was_right_is_the_same_bit_for_bit(report, case):
    assert report["after"][case] == report["before"][case]
    assert is_right(report["before"], case)


def test_the_penalty_is_the_same(report):
    """Of the reference model, in the reward."""
    before, after = (report[state]["RLOO, KL"]["logs"][0]["kl"] for state in ("before", "after"))
    assert after == before != 0


def test_the_condition_is_met_in_the_repaired_losses(report):
    micro_batches = {"RLOO, micro-batches": 2, "RLOO, generations": 2, **dict.fromkeys(LATER, 2)}
    repaired = sum(micro_batches.get(case, 1) for case in CASES if case not in SAME)
    assert report["reached"]["held"] == repaired
    assert report["reached"]["asked"] == report["reached"]["calls"]


def test_reverted_it_is_as_released(report):
    assert report["reverted"] == {case: report["before"][case] for case in report["reverted"]}


@pytest.fixture(scope="module")
def users(run_ranks):
    (found,) = run_ranks(USERS, levels=TRL, ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


@exhaustive
@pytest.mark.parametrize("case", [case for case in HOW if case not in (*REPAIRED, *CORRECTED)])
def test_what_a_user_has_changed_is_as_released(users, case):
    assert users["after"][case] == users["before"][case]
    assert users["before"][case]["steps"][0]["error"] > 0.05


@exhaustive
def test_completions_of_an_earlier_train_have_another_policy(users):
    before, after = (users[state]["train() again"]["steps"] for state in ("before", "after"))
    assert after[0]["error"] < ROUNDING < before[0]["error"]
    assert after[1] == before[1]


@exhaustive
@pytest.mark.parametrize("case", CORRECTED)
def test_with_importance_weights_of_an_engine_it_is_as_released(users, case):
    assert users["after"][case] == users["before"][case]


@exhaustive
def test_where_nothing_is_clipped_the_released_weight_is_that_of_the_loss(users):
    assert users["before"]["engine"]["steps"][0]["error"] < ROUNDING


@exhaustive
@pytest.mark.parametrize("case", ["own rewards", "engine, not corrected"])
def test_other_methods_of_a_user_and_an_engine_change_nothing(users, case):
    assert is_right(users["after"], case)
    assert users["before"][case]["steps"][0]["error"] > 0.05


@exhaustive
def test_two_ranks(run_ranks):
    reports = run_ranks(WORKER, "RLOO, micro-batches", "RLOO, none", levels=TRL, ranks=2, ACCELERATE_USE_CPU="true")
    for found in reports:
        assert is_right(found["after"], "RLOO, micro-batches")
        assert not is_right(found["before"], "RLOO, micro-batches")
        assert found["after"]["RLOO, none"] == found["before"]["RLOO, none"]
    one, other = (found["after"]["RLOO, micro-batches"]["steps"] for found in reports)
    assert one == other


@exhaustive
@pytest.mark.parametrize("version", ["0.22.0", "0.24.0", "0.27.2", "0.29.1"])
def test_other_releases(run_ranks, version):
    """As far as they were read; the newest transformers that they work with."""
    folders = [unpacked.folders(f"trl=={version}"), str(folder("transformers-4.57"))]
    level = Level("tests.harness.loading:transformers_alone", os.pathsep.join(folders))
    cases = ("RLOO, LoRA", "RLOO, iterations", "GRPO, steps ahead", "RLOO, none")
    (found,) = run_ranks(WORKER, *cases, levels=(*TORCH, level), ranks=1, ACCELERATE_USE_CPU="true")
    assert (found["version"], found["status"]) == (version, "applied")
    for case in cases:
        assert is_right(found["after"], case), case
    assert found["after"]["RLOO, none"] == found["before"]["RLOO, none"]
