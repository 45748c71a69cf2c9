"""``verl-merged-lora`` on verl's real engine for FSDP (merged_lora_ranks.py)."""

from __future__ import annotations

import pytest

from tests.harness import side_by_side
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import PACKAGES, Level

RULE_COVERAGE = {
    "minimal scope": "test_where_it_was_right_upstreams_own_iterator_is_given",
    "no side effects": "test_the_model_is_as_it_was",
    "backward compatible": "test_where_it_was_right_upstreams_own_iterator_is_given",
    "no new blocking": (
        "because the collectives are upstream's, in their order, and each rank takes all tensors as before"
    ),
    "yields a copy, which stays merged afterwards": "test_the_engine_gets_the_merged_weights",
    "restores the base model": "test_the_model_is_as_it_was",
    "are not affected": "test_where_it_was_right_upstreams_own_iterator_is_given",
}
WORKER = "rlhf_patches.patches.verl.proofs.merged_lora_ranks"
BUG = ("merged", "in bfloat16", "with offload", "closed early")
RIGHT = ("fsdp1", "adapters", "no LoRA")
#: What is sent is bfloat16, rounded once, by at most 2**-8 of a number; parameters in bfloat16 are rounded where LoRA
#: is multiplied and added, too.
TOLERANCE = {"in bfloat16": 2**-7}
ROUNDED = 2**-8


@pytest.fixture(
    scope="module",
    params=exhaustive_but([("0.8", 1), ("0.8", 2), ("0.7", 2)], ("0.8", 1)),
    ids=lambda param: f"{param[0]}, ranks: {param[1]}",
)
def reports(request, run_ranks):
    release, ranks = request.param
    folder = str(side_by_side.folder(f"verl-{release}"))
    levels = (*PACKAGES, Level("tests.harness.loading:verl_critic", folder))
    reports = run_ranks(WORKER, levels=levels, ranks=ranks, TORCHDYNAMO_DISABLE="1")
    for report in reports:
        assert (report["status"], report["version"][: len(release)]) == ("applied", release)
    return reports


@pytest.mark.parametrize("case", BUG)
def test_the_engine_gets_the_merged_weights(reports, case):
    """PEFT's own merge in float64 is what is right; LoRA is ten times as large as some of the base model's weights."""
    tolerance = TOLERANCE.get(case, ROUNDED)
    for report in reports:
        for state in ("before", "reverted"):
            assert report[state][case]["from the base"] < tolerance, "without the patch: the base model"
            assert report[state][case]["from merged"] > 0.9
        after = report["after"][case]
        assert after["from merged"] < tolerance
        assert after["from the base"] > 1
        assert after["settings"] is None
        assert after["names"] == report["before"][case]["names"]
        if case != "closed early":
            assert after["names"] == after["all names"]


def test_the_ranks_get_the_same(reports):
    assert len({report["after"]["merged"]["bits"] for report in reports}) == 1


def test_the_model_is_as_it_was(reports):
    """Bit for bit, after the last tensor, and where the iterator is closed before it."""
    for report in reports:
        for case in (*BUG, *RIGHT):
            found = report["after"][case]
            assert found["parameters stay"], case
            assert found["modules stay"], case
            assert found["identities stay"], case
            assert not found["merged afterwards"], case


@pytest.mark.parametrize("case", RIGHT)
def test_where_it_was_right_upstreams_own_iterator_is_given(reports, case):
    for report in reports:
        assert report["before"][case] == report["after"][case] == report["reverted"][case]
        assert report["after"][case]["given by"] != "_while_merged"
    if case == "fsdp1":
        assert reports[0]["before"][case]["from merged"] < ROUNDED


def test_it_reports_the_models_that_are_sent_without_lora(reports):
    calls = len(BUG) + len(RIGHT)
    for report in reports:
        assert report["reached"] == {"calls": calls, "asked": calls, "held": len(BUG)}


def test_the_patchs_iterator_is_only_for_the_bug(reports):
    for case in BUG:
        assert reports[0]["after"][case]["given by"] == "_while_merged"
