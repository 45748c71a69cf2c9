"""transformers-shared-kv-gradient: tiny Gemma 3n and Gemma 4 under gradient checkpointing, against float64 without."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import beside

PROOF = "rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks"
WORKER = "tests.patches.transformers.shared_kv_gradient_own_ranks"
ZERO3 = "tests.patches.transformers.shared_kv_gradient_zero3_ranks"
FAMILIES = ("Gemma4", "Gemma3n", "Gemma4Unified")
WRONG = (*FAMILIES, "LoRA", "Trainer", "two losses", "two passes", "sdpa", "in place")
RIGHT = tuple(f"{family}, {how}" for family in FAMILIES for how in ("not reentrant", "without checkpointing"))
LEFT = ("evaluation", "no gradients", "generated", "returned", "no sharing", "Qwen3")
OWN = ("own class", "own forward")
RULE_COVERAGE = {
    "minimal scope": "test_all_others_stay",
    "no side effects": "test_the_model_is_only_read",
    "backward compatible": ("test_all_others_stay", "test_attention_of_ones_own_stays_and_that_is_said"),
    "known": "test_attention_of_ones_own_stays_and_that_is_said",
    "no new blocking": "because it computes on this rank's tensors: no lock, no collective",
    "bit for bit": "test_all_others_stay",
    "stays reentrant": "test_it_stays_reentrant",
    "memory stays": "test_states_are_stored_without_a_graph_and_without_a_copy",
    "Only layers": "test_all_others_stay",
}
#: float32 against float64; 4e-5 without checkpointing, for one norm's weight.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def report(run_ranks):
    cases = (*WRONG, *RIGHT, *LEFT, *OWN, "touched", "modes")
    (report,) = run_ranks(WORKER, *cases, levels=beside(None, "trainer"), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("case", WRONG)
def test_without_it_later_layers_add_nothing(report, case):
    assert report["before"][case]["gradient"] > 0.1


@pytest.mark.parametrize("case", WRONG)
def test_with_it_the_gradient_is_that_without_checkpointing(report, case):
    assert report["after"][case]["gradient"] < TOLERANCE
    assert report["after"][case].get("parameters", 99) > 10


def test_the_loss_was_right(report):
    for case in (*FAMILIES, "LoRA"):
        assert report["after"][case]["loss"] == report["before"][case]["loss"]


@pytest.mark.parametrize("case", [*RIGHT, *LEFT])
def test_all_others_stay(report, case):
    assert report["after"][case] == report["before"][case]
    assert report["after"][case].get("gradient", 0) < TOLERANCE


@pytest.mark.parametrize("case", OWN)
def test_attention_of_ones_own_stays_and_that_is_said(report, case):
    assert report["after"][case]["bits"] == report["before"][case]["bits"]
    assert len(report["after"][case]["heard"]) == 1


def test_the_model_is_only_read(report):
    for state in ("before", "after"):
        assert report[state]["touched"]["touched"] == ""


def test_it_stays_reentrant(report):
    """Each layer runs without a graph, then with one."""
    assert report["after"]["modes"] == report["before"]["modes"] == {"runs": [False] * 4 + [True] * 4}


def test_after_revert_it_is_as_released(report):
    for case, found in report["reverted"].items():
        assert found == report["before"][case]


def test_reports_count_the_layers_that_run_again(report):
    assert report["reached"]["held"] > 0
    assert report["reached"]["held"] < report["reached"]["asked"] / 4


def test_states_are_stored_without_a_graph_and_without_a_copy(apply_patch, monkeypatch):
    shared = pytest.importorskip("rlhf_patches.patches.transformers._shared_states")
    ranks = pytest.importorskip(PROOF)
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    apply_patch("transformers-shared-kv-gradient")
    model = ranks.made("Gemma4")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=ranks.REENTRANT)
    seen = []

    class Recorded(modeling.KVSharingDict):
        def __setitem__(self, key, value):
            seen.append(value)
            super().__setitem__(key, value)

    monkeypatch.setattr(modeling, "KVSharingDict", Recorded)
    ranks.loss_of(model).backward()
    released, kept, again, kept_again = seen[0], seen[1], seen[-2], seen[-1]
    assert type(kept) is type(kept_again) is shared.Kept
    assert type(released) is type(again) is tuple
    assert [each.data_ptr() for each in kept] == [each.data_ptr() for each in released]
    assert all(each.is_leaf and each.grad is None for each in kept)


@pytest.mark.exhaustive
def test_compiled_with_breaks_in_the_graph_it_is_right_in_every_step(run_ranks):
    """As released, checkpointing cannot be compiled whole: storing states is a side effect."""
    (report,) = run_ranks(WORKER, "compiled", levels=beside(None, "trainer"), ranks=1)
    assert report["before"]["compiled"]["gradient"] > 0.1
    assert report["after"]["compiled"]["gradient"] < TOLERANCE


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["Gemma4", "Gemma3n"])
def test_under_zero_3_it_is_right(run_ranks, family):
    for report in run_ranks(ZERO3, family, levels=beside(None, "deepspeed"), ranks=2):
        assert report["before"][family]["gradient"] > 0.1
        assert report["after"][family]["gradient"] < TOLERANCE
        assert report["after"][family]["parameters"] > 10
