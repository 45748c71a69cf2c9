"""``deepspeed-kept-gradients`` on real engines, against SGD in float64 (half_precision_ranks.py).

Weights are rounded to bfloat16: 2e-2 of their way.
"""

from __future__ import annotations

import pytest

from rlhf_patches.patches.deepspeed.proofs import half_precision_ranks
from tests.harness.forkserver import beside

RULE_COVERAGE = {
    "minimal scope": "test_what_is_not_affected_is_as_released",
    "no side effects": "because the engine calls a function of the optimizer, as it does with ZeRO",
    "backward compatible": (
        "test_what_is_not_affected_is_as_released",
        "test_unscaled_loss.py::test_users_code_is_as_released",
    ),
    "no new blocking": "because gradients of one rank are dropped: no lock, no collective",
    "known": "test_unscaled_loss.py::test_users_code_is_as_released",
    "ZeRO, pipelines, float32 and fp16 are not affected": "test_what_is_not_affected_is_as_released",
    "is as released": "test_what_is_not_affected_is_as_released",
    "clears gradients itself after each step, nothing changes": "test_what_is_not_affected_is_as_released",
}
WORKER, PATCH = half_precision_ranks.__name__, "deepspeed-kept-gradients"
WRONG = ("bf16", "bf16, no scale", "bf16, accumulated")
SAME = ("bf16, own", "bf16, cleared", "bf16, stage 1", "float32", "fp16")


@pytest.fixture(scope="module")
def report(run_ranks):
    (found,) = run_ranks(WORKER, PATCH, *WRONG, *SAME, levels=beside("deepspeed-0.18.2", "deepspeed"), ranks=1)
    assert found["status"] == "applied"
    assert found["reached"]["held"] > 0
    return found


@pytest.mark.parametrize("case", WRONG)
def test_steps_are_the_gradient_s(report, case):
    assert min(report[state][case]["error"] for state in ("before", "reverted")) > 0.9
    assert report["after"][case]["error"] < 0.05


@pytest.mark.parametrize("case", SAME)
def test_what_is_not_affected_is_as_released(report, case):
    assert report["before"][case] == report["after"][case] == report["reverted"][case]
    if "own" not in case:
        assert report["after"][case]["error"] < 0.05


def test_both_are_needed_in_releases_that_have_both(run_ranks):
    """0.18.5 has the bug of deepspeed-unscaled-loss, too: with one of them alone, bfloat16 is still wrong."""
    levels = beside("deepspeed-0.18.5", "deepspeed")
    for patch in (PATCH, "deepspeed-unscaled-loss"):
        (found,) = run_ranks(WORKER, patch, "bf16", levels=levels, ranks=1)
        assert found["status"] == "applied"
        assert min(found[state]["bf16"]["error"] for state in ("before", "after")) > 0.5
    (found,) = run_ranks(WORKER, "--beside", "deepspeed-unscaled-loss", PATCH, "bf16", levels=levels, ranks=1)
    assert found["before"]["bf16"]["error"] > 0.5
    assert found["after"]["bf16"]["error"] < 0.05


@pytest.mark.parametrize("release", ["deepspeed-0.18.9", None])
def test_repaired_releases_are_left_alone(run_ranks, release):
    (found,) = run_ranks(WORKER, PATCH, "bf16", levels=beside(release, "deepspeed"), ranks=1)
    assert found["status"] == "unaffected"
    assert found["before"] == found["after"]
    assert found["before"]["bf16"]["error"] < 0.05
