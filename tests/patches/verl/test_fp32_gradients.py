"""``verl-fp32-gradients``: what the gradients of 64 micro-batches on two ranks add up to, against their exact sum."""

from __future__ import annotations

import pytest

from tests.harness import unpacked
from tests.harness.forkserver import MEGATRON_AND_PACKAGES, Level, verl

WORKER = "tests.patches.verl.fp32_gradients_ranks"
RULE_COVERAGE = {
    "minimal scope": "test_what_is_asked_for_comes_first_and_float32_is_the_same",
    # fp32_gradients_ranks.py asserts that the user's dictionary stays what it was.
    "no side effects": "test_what_is_asked_for_comes_first_and_float32_is_the_same",
    "backward compatible": "test_what_is_asked_for_comes_first_and_float32_is_the_same",
    "no new blocking": "because the same collectives reduce the same buffers, of another type",
    "the flag stays False": "test_what_is_asked_for_comes_first_and_float32_is_the_same",
    "keep the released behavior": "test_what_is_asked_for_comes_first_and_float32_is_the_same",
}
# float32 keeps 24 bits of sums of bfloat16's 8: exact, but for the last additions. Seen: 4e-9.
ROUNDING = 1e-7
WRONG = ("by default", "all-reduce", "another override")
SAME = ("bfloat16 asked for", "float32", "added up by each rank")
# Newest first: the default of 0.9.0 is Megatron-Bridge. 0.8.0 only runs with Megatron-Bridge 0.5.
WAYS = {"0.7": ("",), "0.9.0": ("", ", by Bridge"), "0.8": (", by Bridge",), "0.7.0": ("",)}


def levels(release):
    if release == "0.9.0":
        return (*MEGATRON_AND_PACKAGES, Level("tests.harness.loading:verl", unpacked.folders("verl==0.9.0")))
    return verl(release)


@pytest.fixture(
    scope="module",
    params=["0.7", "0.8", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("0.9.0", "0.7.0"))],
)
def release_and_reports(request, run_ranks):
    found = run_ranks(WORKER, levels=levels(request.param))
    assert all(report["status"] == "applied" for report in found)
    return request.param, found


@pytest.mark.parametrize("case", WRONG)
def test_gradients_add_up_in_float32(release_and_reports, case):
    release, reports = release_and_reports
    for report in reports:
        for way in WAYS[release]:
            for state in ("before", *(["reverted"] if case == WRONG[0] else [])):
                found = report[state][f"{case}{way}"]
                assert (found["dtype"], found["bytes"]) == ("bfloat16", 2)
                assert found["off"] > (0.005 if case != "another override" else 1e-4)
            found = report["after"][f"{case}{way}"]
            assert (found["dtype"], found["bytes"]) == ("float32", 4)
            assert found["off"] <= ROUNDING


@pytest.mark.parametrize("case", SAME)
def test_what_is_asked_for_comes_first_and_float32_is_the_same(release_and_reports, case):
    """Bit for bit."""
    release, reports = release_and_reports
    for report in reports:
        for way in WAYS[release]:
            assert report["before"][f"{case}{way}"] == report["after"][f"{case}{way}"]


def test_it_reports_the_models_that_add_up_in_16_bits(release_and_reports):
    """Unknown where each rank adds up some parameters in float32."""
    release, reports = release_and_reports
    ways = len(WAYS[release])
    expected = {"calls": 6 * ways, "asked": 5 * ways, "held": len(WRONG) * ways}
    assert [report["reached"] for report in reports] == [expected] * len(reports)


@pytest.mark.exhaustive
def test_the_newest_sets_it_elsewhere_and_is_left_alone(run_ranks):
    for report in run_ranks(WORKER, levels=verl()):
        assert report["status"] == "unaffected"
        assert report["after"] == report["before"]
