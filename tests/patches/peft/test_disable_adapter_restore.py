"""peft-disable-adapter-restore: the reference pass of the real PEFT, and what is trainable after it.

The yardstick of the clipping norm is the policy's gradient in float64, from the definition of LoRA.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import peft

RULE_COVERAGE = {
    "minimal scope": ("test_where_nothing_was_wrong_nothing_changes", "test_what_is_unfrozen_within_stays_so"),
    "no side effects": "test_the_model_and_its_optimizer_are_untouched",
    "backward compatible": (
        "test_an_adapter_that_is_switched_to_within_is_the_trainable_one",
        "test_within_the_adapter_is_off",
        "test_what_is_unfrozen_within_stays_so",
    ),
    "no new blocking": "because it reads and writes requires_grad of this process's parameters; no lock, no collective",
    "`enable_adapter_layers`, called by itself, is not changed": "because it is not what is wrapped",
    "Left as released": (
        "test_an_adapter_that_is_switched_to_within_is_the_trainable_one",
        "test_what_is_made_trainable_within_stays_so",
        "test_where_nothing_was_wrong_nothing_changes",
    ),
    "a run without frozen parts does not change": "test_where_nothing_was_wrong_nothing_changes",
}
WORKER = "tests.patches.peft.disable_adapter_restore_ranks"
WAYS = ("once", "nested", "overlapping", "raising")
FROZEN = ("on_a_first_stage", "in_part_by_hand", "in_inference_mode", "with_a_head")


@pytest.fixture(scope="module", params=[None, pytest.param("peft-0.18", marks=pytest.mark.exhaustive)], ids=str)
def found(request, run_ranks):
    (report,) = run_ranks(WORKER, levels=peft(request.param), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", FROZEN)
def test_frozen_parameters_stay_frozen(found, model, way):
    assert found["before"]["changed"][model][way] == found["reverted"]["changed"][model][way] != []
    assert found["after"]["changed"][model][way] == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["policy", "disabled_before"])
def test_where_nothing_was_wrong_nothing_changes(found, model, way):
    for state in ("before", "after", "reverted"):
        assert found[state]["changed"][model][way] == []


def test_the_clipping_norm_is_the_policys(found):
    """float32 against float64: 1e-5, seen 3e-8."""
    before, after = (found[state]["clipping"] for state in ("before", "after"))
    assert before["norm"] > 1.1 * before["wanted"]
    assert after["norm"] == pytest.approx(after["wanted"], rel=1e-5)


def test_an_adapter_that_is_switched_to_within_is_the_trainable_one(found):
    assert found["after"]["switched within"] == found["before"]["switched within"]
    assert found["after"]["switched within"]
    assert all(".other." in name for name in found["after"]["switched within"])


def test_within_the_adapter_is_off(found):
    for state in ("before", "after", "reverted"):
        assert found[state]["reference"] == {"off within": True, "trainable within": False, "on afterwards": True}


def test_what_is_unfrozen_within_stays_so(found):
    """A layer of the base model, which PEFT does not switch here."""
    for state in ("before", "after", "reverted"):
        assert found[state]["unfrozen within"] == ["base_model.model.up.base_layer.weight"]


def test_what_is_made_trainable_within_stays_so(found):
    """A user's own call in the context, such as set_adapter() of the active adapter, counts."""
    for name, made in found["after"]["made trainable within"].items():
        assert made == ([] if name == "not at all" else found["before"]["made trainable within"][name]), name
    assert found["before"]["made trainable within"]["by hand"]
    assert found["before"]["nested"]
    assert not found["after"]["nested"]


def test_the_model_and_its_optimizer_are_untouched(found):
    """Without it only flags are; with it nothing is."""
    for model, said in found["before"]["touched"].items():
        assert all(".requires_grad has changed: False before" in line for line in said.splitlines()), model
    assert set(found["after"]["touched"].values()) == {None}


def test_what_fsdp_shows_views_of_stays_frozen(run_ranks):
    """Between the policy's forward and backward pass, where the parameters are back when the context is left."""
    for report in run_ranks("tests.patches.peft.disable_adapter_restore_fsdp_ranks", levels=peft(None)):
        assert report["status"] == "applied"
        assert report["reached"]["held"]
        for case, found in report["after"].items():
            assert found["as before"], case
            assert found["norm"] == pytest.approx(found["wanted"], rel=1e-5)
        for state in ("before", "reverted"):
            for case in ("by layers", "as one"):
                assert not report[state][case]["as before"]
                assert report[state][case]["norm"] > 1.1 * report[state][case]["wanted"]
        assert report["after"]["nothing frozen"] == report["before"]["nothing frozen"]
