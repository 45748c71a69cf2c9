"""``deepspeed-topk-drops``: outputs and gradients of the real layer, against float64 (topk_drops_ranks.py).

float32 through a softmax and sums over 12 numbers: 1e-5 of the norm.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from rlhf_patches.patches.deepspeed import topk_drops
from rlhf_patches.patches.deepspeed.proofs import topk_drops_ranks
from tests.harness.forkserver import beside

WORKER = topk_drops_ranks.__name__
ROUNDING = 1e-5
WRONG = ("around zero", "negative", "three", "room", "evaluation")
SAME = ("positive", "nothing dropped")
RULE_COVERAGE = {
    "minimal scope": "test_elsewhere_nothing_changes",
    "no side effects": (
        "because one tensor that the function makes itself has other numbers at places that nobody chose"
    ),
    "backward compatible": "test_elsewhere_nothing_changes",
    "no new blocking": "because nothing is called that was not, and shapes are what they were",
    "as released": "test_experts_take_all_that_they_have_room_for",  # logits choose in the reference, too
    "results are bitwise identical": ("test_elsewhere_nothing_changes", "test_a_logit_of_0_counts_as_chosen"),
    "The patch does not change": "test_elsewhere_nothing_changes",
}


@pytest.fixture(
    scope="module",
    params=[
        "deepspeed-0.18.9",
        *(pytest.param(f"deepspeed-{each}", marks=pytest.mark.exhaustive) for each in ("0.15.2", "0.18.2")),
    ],
)
def report(request, run_ranks):
    (found,) = run_ranks(WORKER, levels=beside(request.param, "deepspeed"), ranks=1)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", WRONG)
def test_experts_take_all_that_they_have_room_for(report, case):
    for state in ("before", "reverted"):
        found = report[state][case]
        assert found["kept"] < found["to keep"]
        assert min(found["off"], found["gradient off"]) > 0.05
    found = report["after"][case]
    assert found["kept"] == found["to keep"]
    assert max(found["off"], found["gradient off"]) <= ROUNDING


def test_a_logit_of_0_counts_as_chosen(report):
    """As tokens of zeros have: released, those that have chosen an expert tie with those that have not."""
    assert report["before"]["zeros"]["kept"] == report["reverted"]["zeros"]["kept"] < report["after"]["zeros"]["kept"]
    assert report["after"]["zeros"]["kept"] == report["after"]["zeros"]["to keep"]


@pytest.mark.parametrize("case", [*SAME, "two", "positions"])
def test_elsewhere_nothing_changes(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]
    if case in SAME:
        assert max(report["after"][case]["off"], report["after"][case]["gradient off"]) <= ROUNDING


def test_the_newest_release_keeps_as_many_and_is_left_alone(run_ranks):
    (found,) = run_ranks(WORKER, levels=beside(None, "deepspeed"), ranks=1)
    assert found["status"] == "unaffected"
    for case in WRONG:
        assert found["before"][case]["kept"] == found["before"][case]["to keep"]
        assert found["after"][case] == found["before"][case]


def test_what_a_run_is_told_does_not_depend_on_the_number_of_choices():
    """The function drops of one choice and of two as well, if a gate of the user's own calls it so."""
    (condition,) = topk_drops.PATCH.conditions
    module, _, name = condition.predicate.partition(":")
    tells = getattr(importlib.import_module(module), name)
    assert "k" not in inspect.signature(tells).parameters
    assert [tells(True, "probs"), tells(True, "position"), tells(False, "probs")] == [None, False, False]


@pytest.mark.parametrize("case", ["positive", "negative"])
def test_a_run_is_not_told_what_only_its_logits_decide(report, case):
    """With logits above 0 it is right as released."""
    assert report["reached"]["held"] == 0
    right = report["before"][case]["kept"] == report["before"][case]["to keep"]
    assert right == (case == "positive")
