"""peft-dora-second-merge: several adapters merged by the real PEFT, against DoRA's definition in float64."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.peft.proofs.dora import LAYERS
from tests.harness.forkserver import peft

RULE_COVERAGE = {
    "minimal scope": "test_what_was_right_is_bit_for_bit_as_released",
    "no side effects": "test_nothing_but_the_weight_changes",
    "backward compatible": (
        "test_what_is_not_known_stays_as_released",
        "test_a_magnitude_of_0_leaves_the_other_outputs_right",
    ),
    "known": "test_what_is_not_known_stays_as_released",
    "no new blocking": "because it is arithmetic on one layer: no lock, no collective, and no value is read",
    "For the first adapter nothing changes, bit for bit": "test_what_was_right_is_bit_for_bit_as_released",
    "the norm stays as released": "test_what_is_not_known_stays_as_released",
    "compute the same when merged as when not": "test_with_it_the_merged_model_is_the_one_that_was_trained",
}
PROOF = "rlhf_patches.patches.peft.proofs.dora_second_merge_ranks"
WORKER = "tests.patches.peft.dora_second_merge_ranks"
WRONG = (
    *LAYERS,
    *(f"{kind}, safe merge" for kind in LAYERS),
    "LoRA, then DoRA",
    "three",
    "one by one",
    "bfloat16",
    "float16",
    "float64",
)
#: Weights are rounded at most twice after each merge, by half a unit.
TOLERANCE = {"bfloat16": 4 * 2**-9, "float16": 4 * 2**-12, "float64": 1e-14}
RIGHT = (*(f"one, {kind}" for kind in LAYERS), "one, safe merge", "DoRA, then LoRA", "two LoRA")
RELEASES = ["peft-0.20", pytest.param("peft-0.18", marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module", params=RELEASES)
def found(request, run_ranks):
    (report,) = run_ranks(PROOF, levels=peft(request.param), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.fixture(scope="module", params=RELEASES)
def others(request, run_ranks):
    (report,) = run_ranks(WORKER, levels=peft(request.param), ranks=1)
    return report


@pytest.mark.parametrize("case", WRONG)
def test_without_it_the_merged_model_is_another(found, case):
    for state in ("before", "reverted"):
        assert min(found[state][case][name] for name in ("off", "outputs off", "unloaded off")) > 0.02


@pytest.mark.parametrize("case", WRONG)
def test_with_it_the_merged_model_is_the_one_that_was_trained(found, case):
    tolerance = TOLERANCE.get(case, 1e-6)
    assert max(found["after"][case][name] for name in ("off", "outputs off", "unloaded off")) < tolerance


@pytest.mark.parametrize("case", [case for case in WRONG if "Conv1D" not in case])
def test_with_it_unmerging_restores_the_base_weights(found, case):
    assert found["after"][case]["unmerged off"] < 2 * TOLERANCE.get(case, 1e-6)


@pytest.mark.parametrize("case", RIGHT)
def test_what_was_right_is_bit_for_bit_as_released(found, case):
    assert found["after"][case] == found["before"][case] == found["reverted"][case]
    assert found["after"][case]["off"] < 1e-6


def test_a_run_is_told_whether_it_was_affected(found):
    """By merges: of each case twice, since it is unloaded, too. Three adapters have two DoRA, one after another."""
    seconds = 2 * len(WRONG)
    assert found["reached"]["held"] == seconds
    firsts = seconds - 2 + 2 * (len(LAYERS) + 2)  # the first of "LoRA, then DoRA" is not DoRA
    assert found["reached"]["asked"] == found["reached"]["calls"] == seconds + firsts


@pytest.mark.parametrize("case", ["own a", "own b", "deleted"])
def test_what_is_not_known_stays_as_released(others, case):
    assert others["after"][case]["digest"] == others["before"][case]["digest"]


def test_a_magnitude_of_0_leaves_the_other_outputs_right(others):
    """Row 3, of which the first merge leaves nothing, is as released; all others are the reference's."""
    before, after, right = (
        others[state][case]["rows"]
        for state, case in (("before", "a magnitude of 0"), ("after", "a magnitude of 0"), ("after", "right"))
    )
    for row in range(len(right)):
        expected = before[row] if row == 3 else right[row]
        assert after[row] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_nothing_but_the_weight_changes(others):
    for state in ("before", "after", "reverted"):
        assert others[state]["tidy"] == {"touched": None, "alive": False, "keys": ["a-weight_norm", "b-weight_norm"]}


def test_with_the_other_patches_a_Conv1D_is_right_after_an_unmerge(others):
    both = others["reverted"]["both"]
    assert both["off"] < 1e-5
    applied = ("peft-dora-second-merge", "peft-dora-conv1d-unmerge", "peft-lora-merge-drift")
    assert {name: both["status"][name] for name in applied} == dict.fromkeys(applied, "applied")


def test_the_newest_release_is_right_and_left_alone(run_ranks):
    (report,) = run_ranks(PROOF, levels=peft(None), ranks=1)
    assert report["status"] == "unaffected"
    assert report["after"] == report["before"]
    assert report["after"]["linear"]["off"] < 1e-6
