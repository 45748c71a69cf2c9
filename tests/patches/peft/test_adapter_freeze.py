"""peft-adapter-freeze: adapters loaded and added to a model that has one, by the real PEFT.

adapter_freeze_ranks.py does it, without the patch and with it. The yardsticks: the policy's gradients in float64 from
the definition of LoRA, and what 0.21, where it is repaired, does with the same calls.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.peft import _requires_grad
from tests.harness.forkserver import peft

RULE_COVERAGE = {
    "minimal scope": "test_where_the_new_one_becomes_active_it_is_the_one_that_is_trained",
    "no side effects": (
        "test_with_it_the_policy_has_the_gradients_that_it_has_alone",
        "test_what_a_tuner_made_for_the_new_one_beforehand_is_left_as_released",
    ),
    "backward compatible": (
        "test_where_the_new_one_becomes_active_it_is_the_one_that_is_trained",
        "test_a_reference_called_as_a_layer_hides_nothing",
        "test_one_that_fails_half_way_changes_nothing",
    ),
    "no new blocking": "because it reads and writes requires_grad of this process's parameters; no lock, no collective",
    "as trainable as they were": "test_with_it_the_policy_has_the_gradients_that_it_has_alone",
    "is left as the release has it": "test_what_a_tuner_made_for_the_new_one_beforehand_is_left_as_released",
    "does not change the first adapter": "test_where_the_new_one_becomes_active_it_is_the_one_that_is_trained",
    "called `set_adapter` or": "test_where_the_new_one_becomes_active_it_is_the_one_that_is_trained",
}
WORKER = "tests.patches.peft.adapter_freeze_ranks"
#: Of the largest gradient. float32 against float64 showed as up to 5e-7.
TOLERANCE = 1e-5
POLICIES = ("LoRA", "with a head", "other layers", "IA3", "called as a container")


@pytest.fixture(
    scope="module", params=["peft-0.20", pytest.param("peft-0.18", marks=pytest.mark.exhaustive)], ids=lambda text: text
)
def found(request, run_ranks):
    (report,) = run_ranks(WORKER, levels=peft(request.param), ranks=1)
    assert report["version"] == f"{request.param.removeprefix('peft-')}.0"
    assert report["status"] == "applied"
    assert 0 < report["reached"]["held"] < report["reached"]["asked"]  # not where adapters are of one mode
    return report


@pytest.fixture(scope="module")
def newest(run_ranks):
    """The environment's own release: the patch stays away."""
    (report,) = run_ranks(WORKER, levels=peft(None), ranks=1)
    assert report["status"] == "unaffected"
    return report


@pytest.mark.parametrize("policy", POLICIES)
def test_without_it_no_gradient_is_left(found, policy):
    for state in ("before", "reverted"):
        observed = found[state][policy]
        assert observed["active"] == "policy"
        assert observed["trainable"] == []
        assert observed["norm"] == 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_with_it_the_policy_has_the_gradients_that_it_has_alone(found, policy):
    observed = found["after"][policy]
    assert observed["active"] == "policy"
    assert observed["trainable"] == ["policy"]
    assert observed["as before"], "not one parameter more or less"
    assert observed["norm"] > 0.1
    if policy != "IA3":
        assert observed["off float64 by"] < TOLERANCE
        assert observed["norm"] == pytest.approx(observed["wanted norm"], rel=TOLERANCE)


def test_a_reference_called_as_a_layer_hides_nothing(found):
    """In layers "0" and "1", one called "1"."""
    for state in ("before", "reverted"):
        assert found[state]["numbered"]["trainable"] == []
    numbered = found["after"]["numbered"]
    assert len(numbered["policy"]) == 4
    assert numbered["trainable"] == numbered["policy"]


def test_what_a_tuner_made_for_the_new_one_beforehand_is_left_as_released(found):
    """UniLoRA's one vector of the reference, frozen by PEFT. 0.18 does not have it."""
    if found["before"]["UniLoRA"] is None:
        pytest.skip("this release does not have it")
    assert found["before"]["UniLoRA"] == found["reverted"]["UniLoRA"] == []
    assert found["after"]["UniLoRA"] == ["policy"]


@pytest.mark.parametrize("how", ["trainable onto frozen", "added onto frozen"])
def test_a_frozen_adapter_stays_frozen(found, how):
    assert found["before"][how] == found["reverted"][how] == ["policy"]
    assert found["after"][how] == []


def test_one_that_fails_half_way_changes_nothing(found):
    for state, as_before in (("before", False), ("after", True), ("reverted", False)):
        assert "is not supported" in found[state]["failed"]["raised"]
        assert found[state]["failed"]["as before"] == as_before


@pytest.mark.parametrize("call", ["switched", "injected"])
def test_where_the_new_one_becomes_active_it_is_the_one_that_is_trained(found, call):
    expected = {"switched": [["reference"], ["policy"]], "injected": [["policy"], ["reference"]]}[call]
    assert found["before"][call] == found["after"][call] == found["reverted"][call] == expected


def test_the_release_that_repaired_it_does_the_same(found, newest):
    for call in ("LoRA", "with a head", "other layers", "IA3", "added onto frozen", "switched"):
        assert found["after"][call] == newest["before"][call], call


@pytest.mark.parametrize(
    ("adapter", "freezes", "told", "trainable"),
    [("second", True, True, True), ("second", False, False, True), ("first", True, False, False)],
)
def test_what_is_said_is_what_was_repaired(monkeypatch, adapter, freezes, told, trainable):
    """Nothing where the new adapter becomes the active one (`inject_adapter_in_model`): that is as released."""
    said = []
    monkeypatch.setattr(_requires_grad.rlhf_patches, "decided", lambda name, found: said.append((name, found)))
    model = torch.nn.Linear(1, 1)
    tuner = SimpleNamespace(active_adapters=["first"])
    _requires_grad.of_the_others(lambda *_: model.requires_grad_(not freezes), tuner, (model, adapter), {})
    assert said == [("peft-adapter-freeze", told)]
    assert model.weight.requires_grad is trainable
