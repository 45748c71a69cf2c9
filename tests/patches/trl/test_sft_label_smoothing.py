"""trl-sft-label-smoothing: SFT whose loss comes from logits, against float64 and against ``loss_type="nll"``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.trl import _labels_taken
from rlhf_patches.patches.trl.sft_label_smoothing import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import TRL, beside

WORKER = "tests.patches.trl.sft_label_smoothing_own_ranks"
PROOF = "rlhf_patches.patches.trl.proofs.sft_label_smoothing_ranks"
WRONG = ("smoothed", "own function", "LoRA")
#: Models whose labels transformers does not shift.
LEFT = ("own class", "prefix tuning", "compiled")
RULE_COVERAGE = {
    "minimal scope": "test_what_did_not_raise_is_the_same",
    "no side effects": "because it reads attributes of trainer, model and outputs",
    "backward compatible": (
        "test_what_did_not_raise_is_the_same",
        "test_labels_that_are_not_shifted_raise_as_released",
    ),
    "no new blocking": "because which metrics are computed depends on settings alone, the same on all ranks",
    "known": "test_labels_that_are_not_shifted_raise_as_released",
    "bit for bit": "test_it_is_what_nll_computes",
    "stay as released": "test_what_did_not_raise_is_the_same",
    "as released": "test_labels_that_are_not_shifted_raise_as_released",
}


class TestContract(PatchContract):
    patch = PATCH
    releases = ("trl==1.3.0", "trl==1.4.0", "trl==1.14.2", "trl==1.15.0")
    held = RULE_COVERAGE


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, levels=TRL, ranks=1, ACCELERATE_USE_CPU="true")
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", WRONG)
def test_it_raised_and_trains(report, case):
    assert "has no attribute 'num_valid_tokens'" in report["before"][case]["failed"]
    assert "failed" not in report["after"][case]
    if case != "LoRA":
        assert report["after"][case]["gradient"] < 1e-5  # float32 against float64


@pytest.mark.parametrize("case", WRONG)
def test_it_is_what_nll_computes(report, case):
    assert report["after"][case] == report["before"][f"{case}, nll"]


def test_what_did_not_raise_is_the_same(report):
    for case in ("chunked", *(f"{case}, nll" for case in WRONG)):
        assert report["after"][case] == report["before"][case], case
        assert "failed" not in report["after"][case]


@pytest.mark.parametrize("case", LEFT)
def test_labels_that_are_not_shifted_raise_as_released(report, case):
    assert "has no attribute 'num_valid_tokens'" in report["before"][case]["failed"]
    assert report["after"][case] == report["before"][case]


def test_after_revert_it_raises_as_released(report):
    assert report["reverted"]["smoothed"] == report["before"]["smoothed"]


def test_the_condition_is_what_raised(report):
    """Each of the three raised in its first step; each trains a step and evaluates one, with the patch."""
    reached = report["reached"]
    assert reached["held"] == 2 * len(WRONG)
    assert reached["asked"] == reached["calls"]


def test_what_is_not_chunked_is_not_asked_of():
    trainer = SimpleNamespace(args=SimpleNamespace(loss_type="nll"))
    assert _labels_taken.taken(trainer, None, {"labels": 0}) is False


def test_two_ranks(run_ranks):
    for found in run_ranks(PROOF, levels=TRL, ranks=2, ACCELERATE_USE_CPU="true"):
        assert "num_valid_tokens" in found["before"]["smoothed"]["failed"]
        assert found["after"]["smoothed"]["gradient"] < 1e-5


@pytest.mark.exhaustive
def test_the_release_that_has_it_first_by_name(run_ranks):
    (found,) = run_ranks(PROOF, levels=beside("trl-1.5", "trl"), ranks=1, ACCELERATE_USE_CPU="true")
    assert "num_valid_tokens" in found["before"]["smoothed"]["failed"]
    assert found["after"]["smoothed"]["gradient"] < 1e-5
