"""transformers-prompt-tuning-count: steps of the real Trainer with PEFT's prompts, against float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.transformers.prompt_tuning_count import PATCH
from rlhf_patches.testing import PatchContract
from tests.harness.forkserver import beside

WORKER = "tests.patches.transformers.prompt_tuning_count_ranks"
PROOF = "rlhf_patches.patches.transformers.proofs.prompt_tuning_count_ranks"
WRONG = ("prompt tuning", "p-tuning", "one by one", "evaluated", "SFT", "after disable_adapter")
RIGHT = ("not the first", "LoRA", "prefix tuning", "without PEFT", "GPT-2", "own count", "own compute_loss")
LEFT = ("own class", "compute_loss_func", "a hook", "a forward hook")
#: Rows of 5, 6, 7 and 8 labels that count; four rows of 5 for SFT.
PREDICTED, COUNTED = 26, 22
RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "because it reads the model's class and adapter, and hands over the labels or a part of them",
    "backward compatible": "test_all_others_stay",
    "known": "test_all_others_stay",
    "no new blocking": "because it reads a rank's model: no lock, no collective",
    "bit for bit": "test_all_others_stay",
    "as released": ("test_all_others_stay", "test_a_disabled_adapter_has_no_virtual_tokens"),
}
#: float32 against float64.
TOLERANCE = 1e-5


class TestContract(PatchContract):
    patch = PATCH
    releases = ("transformers==5.9.0", "transformers==5.10.1", "transformers==5.24.0")
    held = RULE_COVERAGE


@pytest.fixture(scope="module")
def report(run_ranks):
    (report,) = run_ranks(WORKER, levels=beside(None, "trainer"), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("name", WRONG)
def test_without_it_the_first_token_is_left_out(report, name):
    times = 5 / 4 if name == "SFT" else PREDICTED / COUNTED
    assert report["before"][name]["times"] == pytest.approx(times, rel=TOLERANCE)
    assert report["before"][name]["beside"] < TOLERANCE


@pytest.mark.parametrize("name", WRONG)
def test_with_it_the_gradient_is_that_of_the_tokens_that_are_predicted(report, name):
    assert report["after"][name]["times"] == pytest.approx(1, rel=TOLERANCE)
    assert report["after"][name]["beside"] < TOLERANCE


def test_an_evaluation_has_the_same_divisor(report):
    before, after = (report[state]["evaluated"]["evaluated"] for state in ("before", "after"))
    assert before / after == pytest.approx(PREDICTED / COUNTED, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["after disable_adapter", "after disable_adapter, over LoRA"])
def test_a_disabled_adapter_has_no_virtual_tokens(report, name):
    before, after = (report[state][name]["times of the base model"] for state in ("before", "after"))
    assert after == before == pytest.approx(1, rel=TOLERANCE)


def test_mixed_precision_is_no_forward_of_ones_own(report):
    before, after = (report[state]["bf16"]["times"] for state in ("before", "after"))
    assert before / after == pytest.approx(PREDICTED / COUNTED, rel=1e-2)


def test_all_others_stay(report):
    for name in (*RIGHT, *LEFT):
        assert report["after"][name] == report["before"][name], name
    for name in RIGHT:
        assert report["after"][name]["times"] == pytest.approx(1, rel=TOLERANCE), name
    for name in LEFT:
        assert report["after"][name]["times"] == pytest.approx(PREDICTED / COUNTED, rel=TOLERANCE), name


def test_after_revert_it_is_as_released(report):
    for name, found in report["reverted"].items():
        assert found == report["before"][name]


def test_a_users_class_is_not_decided():
    pytest.importorskip("peft")
    ranks = pytest.importorskip("tests.patches.transformers.prompt_tuning_count_ranks")
    tokens = pytest.importorskip("rlhf_patches.patches.transformers._virtual_tokens")
    model = ranks.prompt_tuning_count_ranks.tuned()
    assert tokens._has_prompt(model) is True
    model.__class__ = ranks.Own
    assert tokens._has_prompt(model) is None
    assert tokens.of_prompts(SimpleNamespace(_loss_shifts_labels=True, model=model)) is None
    assert tokens.of_prompts(SimpleNamespace(_loss_shifts_labels=True, model=model.base_model)) is False


def test_two_ranks(run_ranks):
    """Each with all rows: the count is of all ranks."""
    reports = run_ranks(PROOF, levels=beside(None, "trainer"), ranks=2)
    for report in reports:
        assert report["status"] == "applied"
        assert report["before"]["prompt tuning"]["times"] == pytest.approx(PREDICTED / COUNTED, rel=TOLERANCE)
        assert report["after"]["prompt tuning"]["times"] == pytest.approx(1, rel=TOLERANCE)
