"""``deepspeed-rotary-precision`` on real engines and a real Llama (proofs/rotary_precision_ranks.py)."""

from __future__ import annotations

import pytest

from rlhf_patches.patches.deepspeed.proofs import rotary_precision_ranks
from tests.harness.forkserver import beside
from tests.patches import rotary

RULE_COVERAGE = {
    "minimal scope": ("test_other_buffers_are_cast_as_released", "test_float32_is_the_same_bit_for_bit"),
    "no side effects": "test_other_buffers_are_cast_as_released",
    "backward compatible": ("test_float32_is_the_same_bit_for_bit", "test_own_code_is_left_as_released"),
    "known": "test_own_code_is_left_as_released",
    "no new blocking": "because the cast is the release's own: no lock, no collective",
    "all other buffers as released": "test_other_buffers_are_cast_as_released",
    "not transformers' own code": "test_own_code_is_left_as_released",
}
WORKER = rotary_precision_ranks.__name__
WRONG = [case for case in rotary_precision_ranks.CASES if case.startswith("bf16")]
HALF = [*WRONG, "fp16, ZeRO-1"]
FAST = ("bf16, ZeRO-1", "float32", "own code")
OTHERS = tuple(case for case in rotary_precision_ranks.CASES if case not in FAST)
RELEASES = ("0.15.2", "0.18.2", "0.18.5")


@pytest.fixture(
    scope="module",
    params=[
        ("0.18.9", FAST),
        pytest.param(("0.18.9", OTHERS), marks=pytest.mark.exhaustive),
        *(pytest.param((release, FAST), marks=pytest.mark.exhaustive) for release in RELEASES),
    ],
    ids=lambda param: f"{param[0]}-{len(param[1])}",
)
def report(request, run_ranks):
    """Each case without the patch, with it, and after it was reverted."""
    release, cases = request.param
    (report,) = run_ranks(WORKER, *cases, levels=beside(f"deepspeed-{release}", "deepspeed"), ranks=1)
    assert (report["version"], report["status"]) == (release, "applied")
    return report


def of(report, cases):
    return [case for case in cases if case in report["before"]]


def test_without_it_distant_tokens_are_wrong(report):
    """Those that are near are as wrong as bfloat16 is: 0.01."""
    for case in of(report, WRONG):
        found = report["before"][case]
        assert set(found["buffers"].values()) == {"bfloat16"}
        rotary.assert_rounded(found)


def test_with_it_they_are_as_exact_as_near_ones(report):
    for case in of(report, HALF):
        found = report["after"][case]
        assert found["buffers"]["model.rotary_emb.inv_freq"] == "float32"
        rotary.assert_repaired(found, report["before"][case])


def test_other_buffers_are_cast_as_released(report):
    for case in of(report, HALF):
        assert report["after"][case]["buffers"]["user"] == report["before"][case]["buffers"]["user"] != "float32"


def test_float32_is_the_same_bit_for_bit(report):
    for case in of(report, ["float32"]):
        assert report["after"][case] == report["before"][case]


def test_own_code_is_left_as_released(report):
    """And rank 0 says so."""
    for case in of(report, ["own code"]):
        found = report["after"][case]
        (message,) = found.pop("messages")
        assert "Own is not transformers' own" in message
        assert {**found, "messages": []} == report["before"][case]


def test_reverted_it_is_deepspeed_s_own_again(report):
    for case, found in report["reverted"].items():
        assert {**found, "messages": []} == report["before"][case]


def test_a_run_is_told_whether_it_was_affected(report):
    reached = report["reached"]
    assert reached["held"] == len(of(report, HALF))
    assert reached["calls"] == len(report["after"])


@pytest.mark.exhaustive
def test_a_release_that_is_repaired_is_left_alone(run_ranks):
    (report,) = run_ranks(WORKER, "bf16, ZeRO-1", levels=beside(None, "deepspeed"), ranks=1)
    assert report["status"] == "unaffected"
    assert report["after"] == report["before"]
    found = report["after"]["bf16, ZeRO-1"]
    rotary.assert_exact(found)
