"""peft-dora-conv1d-unmerge: base weights before a merge and after the unmerge, with the real PEFT."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.peft._conditions import stored_transposed
from tests.harness.forkserver import peft
from tests.harness.logs import diagnosed

RULE_COVERAGE = {
    "minimal scope": "test_other_layers_are_bit_for_bit_as_released",
    "no side effects": "because it transposes a view of a new tensor; nothing else is read or written",
    "backward compatible": "test_other_layers_are_bit_for_bit_as_released",
    "no new blocking": "because it is arithmetic on one layer: no lock, no collective",
    "For `nn.Linear` nothing changes, bit for bit": "test_other_layers_are_bit_for_bit_as_released",
    "are the same after a DoRA adapter was merged and unmerged": "test_with_it_the_base_weights_are_those_before",
}
NAME = "peft-dora-conv1d-unmerge"
WORKER = "rlhf_patches.patches.peft.proofs.dora_conv1d_unmerge_ranks"
CONV1D = {"Conv1D": 1e-5, "Conv1D, safe merge": 1e-5, "Conv1D, not square": 1e-5, "Conv1D, bfloat16": 2 * 2**-8}
#: By what rounding may change them.
LEFT_ALONE = ("linear", "embedding", "convolution", "Conv1D, LoRA")


@pytest.fixture(scope="module", params=["peft-0.20", pytest.param("peft-0.18", marks=pytest.mark.exhaustive)])
def found(request, run_ranks):
    (report,) = run_ranks(WORKER, levels=peft(request.param), ranks=1)
    assert report["status"] == "applied"
    return report


@pytest.mark.parametrize("case", CONV1D)
def test_without_it_the_base_weights_are_others(found, case):
    for state in ("before", "reverted"):
        assert found[state][case]["off"] > 0.1
        assert bool(found[state][case]["raised"]) is (case == "Conv1D, not square")


@pytest.mark.parametrize("case", CONV1D)
def test_with_it_the_base_weights_are_those_before(found, case):
    observed = found["after"][case]
    assert observed["raised"] is None
    assert observed["off"] < CONV1D[case]


def test_disabled_while_it_is_merged_the_model_is_the_base_model(found):
    assert found["before"]["disabled"]["off"] > 0.1
    assert found["after"]["disabled"]["off"] < 1e-5


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_other_layers_are_bit_for_bit_as_released(found, case):
    assert found["after"][case] == found["before"][case] == found["reverted"][case]
    assert found["after"][case]["off"] < 1e-6


@pytest.mark.parametrize("case", [*CONV1D, *LEFT_ALONE])
def test_the_merge_itself_is_as_released(found, case):
    assert found["after"][case]["merged"] == found["before"][case]["merged"]


def test_a_run_is_told_of_Conv1D_alone(found):
    """A linear layer is asked, too; embeddings and convolutions have functions of their own."""
    assert found["reached"] == {"calls": 6, "asked": 6, "held": 5}


@pytest.mark.parametrize(("value", "told"), [(True, True), (False, False), (None, None)])
def test_the_condition(value, told):
    layer = SimpleNamespace() if value is None else SimpleNamespace(fan_in_fan_out=value)
    assert stored_transposed(layer) is told


def test_the_newest_release_is_right_and_left_alone(run_ranks):
    (report,) = run_ranks(WORKER, levels=peft(None), ranks=1)
    assert report["status"] == "unaffected"
    assert report["after"] == report["before"]
    assert max(report["after"][case]["off"] for case in ("Conv1D", "Conv1D, not square", "linear")) < 1e-5


def test_its_exception_is_recognized():
    frame = 'peft/tuners/lora/variants.py", line 214, in unmerge\n    new_weight = orig_weight.data / dora_factor'
    log = (
        f'Traceback (most recent call last):\n  File "/x/site-packages/{frame}\n'
        "RuntimeError: The size of tensor a (16) must match the size of tensor b (32) at non-singleton dimension 0\n"
    )
    assert diagnosed(log) == [(NAME, True)]
