"""``swift-megatron-dpo-loss-type``: each loss of ms-swift's Megatron DPO, against its published formula in float64.

What is observed is in megatron_dpo_loss_type_ranks.py: as released, patched and reverted, in one process on each rank.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import swift

WORKER = "tests.patches.swift.megatron_dpo_loss_type_ranks"
# float32 through a layer and sums over tokens, which nearly cancel out, against float64; seen: up to 1e-6.
ROUNDING = 1e-5
OTHERS = ("hinge", "ipo", "apo_zero", "sppo_hard")
OUT_OF_REACH = ("bco_pair", "discopop", "sft", "hinged")

RULE_COVERAGE = {
    "minimal scope": "test_a_training_step_minimizes_the_loss_that_was_asked_for",
    "no side effects": "because it calls the trainer's dpo_loss and get_logps, and assigns nothing",
    "backward compatible": "test_what_this_trainer_cannot_compute_stays_sigmoid_in_words",
    "as released": "test_what_this_trainer_cannot_compute_stays_sigmoid_in_words",
    "Runs with `sigmoid` are not affected": "test_a_training_step_minimizes_the_loss_that_was_asked_for",
    "known": "test_other_releases",
    "no new blocking": (
        "test_what_this_trainer_cannot_compute_stays_sigmoid_in_words",
        "test_on_context_parallel_ranks",
    ),
}


@pytest.fixture(scope="module")
def observe(run_ranks):
    def run(*parts, ranks=1, folder=None):
        found = run_ranks(WORKER, *parts, levels=swift(folder, "swift_megatron"), ranks=ranks)
        assert all(report["status"] == "applied" for report in found)
        assert all(0 < report["reached"]["held"] < report["reached"]["asked"] for report in found)  # not of sigmoid
        return found

    return run


def check(report, *parts):
    for part in parts:
        for state in ("before", "reverted"):
            released = report[state][part]
            assert max(released["sigmoid"][what] for what in ("loss", "gradient")) <= ROUNDING
            for loss_type in OTHERS:
                assert released[loss_type]["value"] == released["sigmoid"]["value"], "whatever is asked for"
                assert released[loss_type]["loss"] > 0.01
                assert released[loss_type]["gradient"] > 0.01
        after = report["after"][part]
        assert after["sigmoid"] == report["before"][part]["sigmoid"]
        for loss_type in OTHERS:
            assert after[loss_type]["loss"] <= ROUNDING, loss_type
            assert after[loss_type]["gradient"] <= ROUNDING, loss_type


def test_a_training_step_minimizes_the_loss_that_was_asked_for(observe):
    """Through `forward_step`, a policy and a reference model; and packed sequences."""
    (report,) = observe("step", "packed")
    check(report, "step", "packed")


def test_on_context_parallel_ranks(observe):
    """Each has its part of every sequence: IPO's mean is over the tokens of all."""
    for report in observe("packed", ranks=2):
        check(report, "packed")


@pytest.mark.parametrize("loss_type", OUT_OF_REACH)
def test_what_this_trainer_cannot_compute_stays_sigmoid_in_words(observe, loss_type):
    """On the last pipeline stage alone: an error there would leave the other stages waiting."""
    (report,) = observe("step", "packed")
    sigmoid = report["before"]["packed"]["sigmoid"]["value"]
    assert report["before"][loss_type] == {"values": [sigmoid] * 2, "said": []}, "sigmoid, without a word"
    assert report["after"][loss_type]["values"] == [sigmoid] * 2
    (said,) = report["after"][loss_type]["said"]
    assert "sigmoid" in said


def test_a_run_with_such_a_loss_alone_is_not_said_to_be_repaired(run_ranks):
    (report,) = run_ranks(WORKER, levels=swift(None, "swift_megatron"), ranks=1)
    assert report["status"] == "applied"
    assert report["after"]["of the bug"] == []
    assert (report["reached"]["asked"], report["reached"]["held"]) == (0, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", ["swift-3.8", "swift-3.9", "swift-3.12", "swift-4.3", "swift-4.5"])
def test_other_releases(observe, folder):
    """TRL's function, or ms-swift's own; sums by the number of samples, or without."""
    for ranks in (1, 2):
        for report in observe("packed", ranks=ranks, folder=folder):
            check(report, "packed")
