"""peft-disable-adapter-fsdp: a policy and its reference by the real PEFT, in real FSDP on two gloo ranks.

The yardstick: the same step in float64, not sharded.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import peft
from tests.harness.logs import diagnosed

RULE_COVERAGE = {
    "minimal scope": "test_where_nothing_is_gathered_nothing_changes",
    "no side effects": "test_with_it_gradients_are_those_of_the_whole_model",
    "backward compatible": (
        "test_where_nothing_is_gathered_nothing_changes",
        "test_set_adapter_on_views_raises_as_before",
    ),
    "no new blocking": (
        "because it exchanges what one rank's modules show while PEFT switches them; no lock, no collective"
    ),
    "The patch sets no flags of views": "test_with_it_gradients_are_those_of_the_whole_model",
    "`set_adapter`, called by itself on views, raises as before": "test_set_adapter_on_views_raises_as_before",
}
WORKER = "rlhf_patches.patches.peft.proofs.disable_adapter_fsdp_ranks"
WRONG = ("second", "within")
#: Of the largest gradient: float32 against float64.
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["peft-0.18", pytest.param("peft-0.7", marks=pytest.mark.exhaustive)], ids=str)
def reports(request, run_ranks):
    reports = run_ranks(WORKER, levels=peft(request.param))
    for report in reports:
        assert report["status"] == "applied"
        assert report["version"] == f"{request.param.removeprefix('peft-')}.0"
    return reports


@pytest.mark.parametrize("step", [*WRONG, "left late"])
def test_without_it_the_step_fails(reports, step):
    for report in reports:
        for state in ("before", "reverted"):
            raised = report[state][step]["raised"]
            assert "you can only change requires_grad flags of leaf variables" in raised
            assert ("peft-disable-adapter-fsdp", True) in diagnosed(raised)


@pytest.mark.parametrize("step", [*WRONG, "first"])
def test_with_it_gradients_are_those_of_the_whole_model(reports, step):
    for report in reports:
        found = report["after"][step]
        assert found["switched"] == []
        assert found["the same parameters"]
        assert found["off by"] < TOLERANCE


def test_parameters_behind_views_do_not_stay_frozen(reports):
    for report in reports:
        assert report["after"]["left late"] == {"switched": []}


def test_where_nothing_is_gathered_nothing_changes(reports):
    for report in reports:
        assert report["after"]["first"] == report["before"]["first"] == report["reverted"]["first"]


def test_set_adapter_on_views_raises_as_before(reports):
    for report in reports:
        for state in ("before", "after", "reverted"):
            assert "you can only change requires_grad flags of leaf variables" in report[state]["set on views"]


def test_the_release_that_repaired_it_is_left_alone(run_ranks):
    """Its own repair leaves adapters frozen where the context is left on views."""
    for report in run_ranks(WORKER, levels=peft(None)):
        assert report["status"] == "unaffected"
        assert report["after"] == report["before"]
        for step in ("second", "within", "first"):
            assert report["after"][step]["off by"] < TOLERANCE
        assert any("lora_" in name for name in report["after"]["left late"]["switched"])
