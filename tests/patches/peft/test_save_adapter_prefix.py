"""peft-save-adapter-prefix: one of several adapters saved by the real PEFT.

The yardstick is the file of a model that has only this adapter, with the same values.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import peft

RULE_COVERAGE = {
    "minimal scope": "test_a_single_adapter_and_other_methods_are_as_ever",
    "no side effects": "test_the_model_and_a_given_state_dict_are_untouched",
    "backward compatible": (
        "test_with_it_the_file_has_this_adapter_alone",
        "test_a_single_adapter_and_other_methods_are_as_ever",
    ),
    "no new blocking": (
        "because it filters a dictionary, and asks for the state dict where PEFT would, as often; no lock"
    ),
    "are left as released": "test_a_single_adapter_and_other_methods_are_as_ever",
}
WORKER = "rlhf_patches.patches.peft.proofs.save_adapter_prefix_ranks"
KINDS = ("LoRA", "with a head")
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", params=["peft-0.18", pytest.param("peft-0.7", marks=pytest.mark.exhaustive)])
def found(request, run_ranks):
    (report,) = run_ranks(WORKER, levels=peft(request.param), ranks=1)
    assert report["status"] == "applied"
    return report


@each_kind
@pytest.mark.parametrize("adapter", ["policy", "up"])
def test_without_it_others_are_saved_too(found, kind, adapter):
    """One whose name begins alike; and, for a name that a module has, all that this module has."""
    for state in ("before", "reverted"):
        assert len(found[state][kind][adapter]["superfluous"]) >= 4
        assert not found[state][kind][adapter]["same from a state dict"]


@each_kind
@pytest.mark.parametrize("adapter", ["policy", "policy_ref", "up"])
def test_with_it_the_file_has_this_adapter_alone(found, kind, adapter):
    """From the model, and from a state dict that somebody has gathered."""
    assert found["after"][kind][adapter] == {
        "superfluous": [],
        "missing": [],
        "same": True,
        "same from a state dict": True,
    }


@pytest.mark.parametrize("case", ["only one", "IA3"])
def test_a_single_adapter_and_other_methods_are_as_ever(found, case):
    assert found["after"][case] == found["before"][case]
    assert found["after"][case]


def test_the_model_and_a_given_state_dict_are_untouched(found):
    """And another mapping than a dictionary is taken."""
    assert found["after"]["touched"] is None
    assert found["after"]["a mapping"] == found["after"]["a dictionary"] != []
