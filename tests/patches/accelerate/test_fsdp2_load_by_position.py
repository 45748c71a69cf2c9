"""``accelerate-fsdp2-load-by-position`` with real FSDP2 and bitsandbytes, two gloo ranks (..._ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.accelerate import fsdp2_load_by_position
from tests.harness.forkserver import beside
from tests.harness.logs import diagnosed

RULE_COVERAGE = {
    "minimal scope": (
        "test_what_has_no_other_entries_is_the_same",
        "test_where_a_tensor_is_missing_pairs_are_upstream_s",
    ),
    "no side effects": "because it reads two dictionaries and makes pairs of what is in them",
    "backward compatible": (
        "test_what_has_no_other_entries_is_the_same",
        "test_where_a_tensor_is_missing_pairs_are_upstream_s",
    ),
    "no new blocking": "test_where_a_tensor_is_missing_pairs_are_upstream_s",
}
WORKER = "rlhf_patches.patches.accelerate.proofs.fsdp2_load_by_position_ranks"
WRONG = ("QLoRA, on meta elsewhere", "QLoRA in bytes")
RIGHT, BITSANDBYTES = "LoRA", "bitsandbytes-0.50"
# Float32 arithmetic of three steps.
TOLERANCE = 1e-5


@pytest.fixture(
    scope="module",
    params=[
        "1.13",
        pytest.param("1.8", marks=pytest.mark.exhaustive),
    ],
)
def reports(request, run_ranks):
    """Of both ranks: each case without the patch, with it, and after it was reverted."""
    reports = run_ranks(
        WORKER, levels=beside(f"accelerate-{request.param}", "accelerate_and_bitsandbytes", BITSANDBYTES)
    )
    for report in reports:
        assert (report["version"], report["status"]) == (f"{request.param}.0", "applied")
    return reports


@pytest.mark.parametrize("state", ["before", "reverted"])
@pytest.mark.parametrize("case", WRONG)
def test_without_it_rank_0_fails_and_rank_1_waits(reports, state, case):
    first, second = (report[state][case] for report in reports)
    assert first["raised"] == "AttributeError: `weight` is not an nn.Module"
    assert diagnosed(first["log"]) == [(fsdp2_load_by_position.PATCH.name, True)]
    assert second["raised"].startswith("RuntimeError"), "after 3 seconds, as the worker has set"
    assert "dist.broadcast(full_tensor, src=0" in second["log"]


@pytest.mark.parametrize("case", [*WRONG, RIGHT])
def test_with_it_all_ranks_have_rank_0_s_adapter_and_train_it(reports, case):
    for report in reports:
        found = report["after"][case]
        assert found["raised"] is None
        assert found["start"] == 0.0
        assert found["error"] < TOLERANCE


def test_what_has_no_other_entries_is_the_same(reports):
    for report in reports:
        assert report["after"][RIGHT] == report["before"][RIGHT] == report["reverted"][RIGHT]


@pytest.mark.exhaustive
def test_a_release_that_is_repaired_is_left_alone(run_ranks):
    """The installed one. QLoRA it does not load at all."""
    for report in run_ranks(WORKER, RIGHT, levels=beside(None, "accelerate_and_bitsandbytes", BITSANDBYTES)):
        assert report["status"] == "unaffected"
        assert report["after"] == report["before"]
        assert report["after"][RIGHT]["error"] < TOLERANCE


def test_pairs_are_by_name_in_the_sharded_model_s_order():
    pairs = fsdp2_load_by_position.by_name({"b": 1, "b.absmax": 2, "a": 3}, {"a": 4, "b": 5})
    assert list(pairs) == [(("a", 3), 4), (("b", 1), 5)]


def test_where_a_tensor_is_missing_pairs_are_upstream_s():
    """Nothing is raised while the other ranks wait for the first tensor."""
    full, sharded = {"a": 1, "c": 3}, {"a": 2, "b": 3}
    assert list(fsdp2_load_by_position.by_name(full, sharded)) == list(zip(full.items(), sharded.values(), strict=True))
