"""``megatron-core-expert-bias-counts``: real routers within Float16Module, two ranks (expert_bias_counts_ranks.py)."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from rlhf_patches.patches.megatron_core._conditions import counts_in_half
from rlhf_patches.patches.megatron_core._expert_counts import in_float32, keep_counts
from tests.harness.by_case import exhaustive_but
from tests.harness.forkserver import megatron

RULE_COVERAGE = {
    "minimal scope": "test_all_else_is_as_before",
    "no side effects": "test_only_counters_in_half_precision_are_touched",
    "backward compatible": (
        "test_all_else_is_as_before",
        "test_only_counters_in_half_precision_are_touched",
        "test_a_forward_compiles_as_before",
    ),
    "no new blocking": "test_ranks_add_up_one_precision",  # the all-reduce is Megatron's own
    "are not affected": "test_all_else_is_as_before",
    "moves by the configured rate": "test_what_bf16_can_count_moves_the_same",
    "count the same tokens as before": "test_only_counters_in_half_precision_are_touched",
}
WORKER = "tests.patches.megatron_core.expert_bias_counts_ranks"
RELEASES = pytest.mark.parametrize(
    "release",
    [None, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("megatron-0.15", "megatron-0.19"))],
)
WRONG = ["thousands, bf16", "many small micro-batches, bf16"]
CORE = (*WRONG, "few, bf16", "few, fp32", "thousands, fp32")
SLOW = "many small micro-batches, fp32"


@pytest.fixture(scope="module")
def run(run_ranks):
    @functools.cache
    def run(release=None, *cases):
        reports = run_ranks(WORKER, *(cases or CORE), levels=megatron(release))
        assert [one["status"] for one in reports] == ["applied"] * 2
        assert cases or all(0 < one["reached"]["held"] < one["reached"]["asked"] for one in reports)
        return reports

    return run


@RELEASES
@pytest.mark.parametrize("case", WRONG)
def test_each_bias_moves_as_its_count_says(run, release, case):
    """By counts in integers: exactly, in every router."""
    for report in run(release):
        before, after = report["before"][case], report["after"][case]
        assert before["directions"] != before["wanted"]
        assert after["moved"] == after["wanted"]
        assert any(abs(4 * one - sum(after["counted"])) > 0 for one in after["counted"])
        assert after["probabilities"] == before["probabilities"]
        if case == CORE[0]:
            assert report["reverted"][case] == before


ELSE = ["few, fp32", "thousands, fp32", SLOW, "no expert bias"]


@RELEASES
@pytest.mark.parametrize("case", exhaustive_but(ELSE, *(case for case in ELSE if case != SLOW)))
def test_all_else_is_as_before(run, release, case):
    for report in run(release, *([SLOW] if case == SLOW else [])):
        assert report["after"][case] == report["before"][case]
        if case != "no expert bias":
            assert report["after"][case]["moved"] == report["after"][case]["wanted"]


@RELEASES
def test_what_bf16_can_count_moves_the_same(run, release):
    """In the same direction; by the rate, which was rounded to bf16 as well."""
    for report in run(release):
        before, after = (report[state]["few, bf16"] for state in ("before", "after"))
        assert before["directions"] == before["wanted"] == after["moved"]
        assert {abs(one) for several in before["moved"] for one in several} == {0.999451}


@RELEASES
def test_ranks_add_up_one_precision(run, release):
    """Where no router of one of them has run in this step."""
    reports = run(release)
    assert [one["after"]["skipped"]["counters"][0] for one in reports] == ["torch.bfloat16", "torch.float32"]
    for report in reports:
        assert report["after"]["skipped"]["moved"] == report["after"]["skipped"]["wanted"]


def test_a_forward_compiles_as_before(run):
    """As one graph: nothing is called in it that torch.compile cannot trace."""
    for report in run():
        assert report["before"]["compiled"] is None
        assert report["after"]["compiled"] is None


def test_a_run_that_counts_nothing_in_16_bits_is_not_said_to_meet_the_bug():
    """Without gradients nothing is counted, nor by a router that LoRA has frozen; a user may count otherwise."""
    config = SimpleNamespace(moe_router_enable_expert_bias=True, bf16=True, fp16=False)

    def router(dtype=torch.bfloat16, **more):
        return SimpleNamespace(config=config, local_tokens_per_expert=torch.ones(2, dtype=dtype), **more)

    assert counts_in_half(router()) is True
    assert counts_in_half(router(torch.float16)) is True
    with torch.no_grad():
        assert counts_in_half(router()) is None
    assert counts_in_half(router(frozen_expert_bias=True)) is None
    for dtype in (torch.float32, torch.int64):
        assert counts_in_half(router(dtype)) is None


def test_only_counters_in_half_precision_are_touched():
    for dtype in (torch.bfloat16, torch.float16):
        counts = torch.tensor([3.0, 200.0], dtype=dtype)
        router = SimpleNamespace(local_tokens_per_expert=counts)
        with torch.no_grad():
            assert keep_counts(router) is True
            assert counts.dtype == dtype, "it counts with gradients only"
        assert keep_counts(router) is True
        assert router.local_tokens_per_expert is counts
        assert counts.dtype == torch.float32
        assert counts.tolist() == [3.0, 200.0]
    for other in (None, torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)):
        assert in_float32(other) is other
        assert keep_counts(SimpleNamespace(local_tokens_per_expert=other)) is True
    assert keep_counts(SimpleNamespace()) is True
