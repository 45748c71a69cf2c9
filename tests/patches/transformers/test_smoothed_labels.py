"""transformers-smoothed-labels: steps of the real Trainer with wrapped models, against float64."""

from __future__ import annotations

import pytest

from tests.harness.by_case import States, exhaustive_but
from tests.harness.forkserver import beside

WORKER = "tests.patches.transformers.smoothed_labels_ranks"
WRONG = ("compiled", "compiled before", "LoRA, compiled", "prefix tuning", "FSDP2", "DDP, compiled")
FEW = ("compiled", "FSDP2")
"""One for each mutation; the others are the same loss through other wrappers."""
WRAPPED = ("FSDP2", "DDP, compiled")
FOUND = ("plain", "LoRA")
NOT_CAUSAL = ("T5", "T5, compiled", "classifier, compiled", "own class", "own class, compiled")
RULE_COVERAGE = {
    "minimal scope": "test_where_the_name_is_found_nothing_is_asked",
    "no side effects": "test_a_wrapped_model_is_only_read",
    "backward compatible": ("test_where_the_name_is_found_nothing_is_asked", "test_what_is_not_causal_stays"),
    "known": "test_what_is_not_causal_stays",
    "no new blocking": "because it reads attributes of the model: no lock, no collective",
    "bit for bit": "test_what_is_not_causal_stays",
    "the patch looks up nothing": "test_where_the_name_is_found_nothing_is_asked",
    "as released": ("test_what_is_not_causal_stays", "test_what_a_user_shifts_is_not_shifted_again"),
    "only reads the wrappers, and unwraps nothing": "test_a_wrapped_model_is_only_read",
}
#: float32 against float64.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module",
    params=[pytest.param(None, id="5.23"), pytest.param("transformers-4.57", id="4.57", marks=pytest.mark.exhaustive)],
)
def report(request, run_ranks):
    def run(case):
        (report,) = run_ranks(WORKER, case, levels=beside(request.param, "trainer"), ranks=1)
        assert report["version"].startswith(request.param.rpartition("-")[2] if request.param else "5.")
        assert report["status"] == "applied"
        return report

    return States(run)


@pytest.mark.parametrize("name", exhaustive_but(WRONG, *FEW))
def test_without_it_the_labels_are_not_shifted(report, name):
    assert report["before"][name]["gradient off"] > 0.5
    assert report["before"][name]["loss off"] > 1e-3


def test_after_revert_it_is_as_released(report):
    assert report["reverted"][FEW[0]] == report["before"][FEW[0]]


@pytest.mark.parametrize("name", exhaustive_but(WRONG, *FEW))
def test_with_it_the_gradient_is_that_of_the_definition(report, name):
    assert report["after"][name]["gradient off"] < TOLERANCE
    assert report["after"][name]["loss off"] < TOLERANCE


@pytest.mark.parametrize("name", exhaustive_but(WRAPPED, "FSDP2"))
def test_a_wrapped_model_is_only_read(report, name):
    assert report["after"][name]["touched"] == ""
    assert report["after"][name]["name"] == "Qwen3ForCausalLM"


@pytest.mark.parametrize("name", exhaustive_but((*FOUND, "not smoothed"), *FOUND))
def test_where_the_name_is_found_nothing_is_asked(report, name):
    assert report["after"][name] == report["before"][name]
    assert report["after"][name]["asked"] == 0
    if name in FOUND:
        assert report["after"][name]["gradient off"] < TOLERANCE


@pytest.mark.parametrize("name", exhaustive_but(NOT_CAUSAL, "T5", "own class"))
def test_what_is_not_causal_stays(report, name):
    assert {**report["after"][name], "asked": 0} == report["before"][name]
    assert report["after"][name]["asked"] == 1


@pytest.mark.parametrize("name", ["shifted by a smoother", "shifted by compute_loss"])
def test_what_a_user_shifts_is_not_shifted_again(report, name):
    assert report["after"][name] == report["before"][name]
    assert report["after"][name]["gradient off"] < TOLERANCE
