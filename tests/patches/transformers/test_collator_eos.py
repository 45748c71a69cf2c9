"""transformers-collator-eos: steps of Trainer, against float64, on texts whose padding is their end."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.transformers.collator_eos import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import TRL, beside

RULE_COVERAGE = {
    "minimal scope": "test_what_is_not_affected_is_the_same",
    "no side effects": "because it computes which labels are ignored; nothing is written but upstream's own labels",
    "backward compatible": "test_what_is_not_affected_is_the_same",
    "no new blocking": "because it is arithmetic of one batch: no lock, no collective",
    "stay as released, bit for bit": "test_what_is_not_affected_is_the_same",
    "stays as released, too": "test_what_is_not_affected_is_the_same",
    "stays ignored": "test_the_ends_of_texts_are_labels",
    "only the positions": "test_the_ends_of_texts_are_labels",
}
WORKER = "tests.patches.transformers.collator_eos_own_ranks"
AFFECTED = {"padded": 2, "packed": 4, "begins, padded on the left": 2}
SAME = ("own padding token", "padded before", "own", "masked language modeling")
#: Forward and backward in float32, of one layer.
ROUNDING = 1e-5


class TestContract(PatchContract):
    patch = PATCH
    held = RULE_COVERAGE


@pytest.fixture(
    scope="module",
    params=[None, pytest.param("transformers-4.57", marks=pytest.mark.exhaustive)],
)
def report(request, run_ranks):
    levels = beside(request.param, "trainer") if request.param else TRL
    (found,) = run_ranks(WORKER, *AFFECTED, *SAME, levels=levels, ranks=1)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", AFFECTED)
def test_the_ends_of_texts_are_labels(report, request, case):
    before, after = (report[state][case] for state in ("before", "after"))
    assert (before["ends"], after["ends"]) == (0, AFFECTED[case])
    assert after["gradient"] < ROUNDING < 0.1 < before["gradient"]
    if request.node.callspec.params.get("report") is None:
        assert after["times"] == pytest.approx(1, rel=ROUNDING)
    ignored = [sum(label == -100 for row in found["labels"] for label in row) for found in (before, after)]
    assert ignored[0] - ignored[1] == AFFECTED[case], "padding is ignored as before"


@pytest.mark.parametrize("case", SAME)
def test_what_is_not_affected_is_the_same(report, case):
    assert report["after"][case] == report["before"][case]


def test_how_often_it_was_met(report):
    assert (report["reached"]["asked"], report["reached"]["held"]) == (len(AFFECTED) + len(SAME) - 1, len(AFFECTED))


def test_reverted_it_is_the_release_s_own_again(report):
    assert report["reverted"]["padded"] == report["before"]["padded"]


def test_it_is_off_unless_asked_for_by_name():
    assert "since 2023" in PATCH.contested
