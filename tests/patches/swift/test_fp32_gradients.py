"""``swift-fp32-gradients``: what the gradients of 64 micro-batches on two ranks add up to, against their exact sum."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rlhf_patches.patches.swift._conditions import reduces_in_half
from tests.harness import side_by_side, unpacked
from tests.harness.forkserver import PACKAGES, Level, swift

WORKER = "tests.patches.swift.fp32_gradients_ranks"
RULE_COVERAGE = {
    "minimal scope": "test_where_float32_is_not_asked_for_nothing_changes",
    "no side effects": "because it hands one more field to a configuration that ms-swift makes anew",
    "backward compatible": "test_where_float32_is_not_asked_for_nothing_changes",
    "to keep the released behavior": "test_where_float32_is_not_asked_for_nothing_changes",
    "known": "test_a_class_of_a_users_is_unknown",
    "no new blocking": "because the same collectives reduce the same buffers, of another type",
}
# float32 keeps 24 bits of sums of bfloat16's 8: exact, but for the last additions. Seen: 4e-9.
ROUNDING = 1e-7
REPAIRED = ("by default", "all-reduce")
SAME = ("bfloat16 asked for", "float16", "float32", "under the field's name")


def levels(release):
    if not release.startswith("swift-"):
        # 4.0.0 imports what TRL had up to 0.24, which lies beside 3.12.
        trl = [str(side_by_side.folder("swift-3.12"))] if release == "4.0.0" else []
        folders = os.pathsep.join([unpacked.folders(f"ms-swift=={release}"), *trl])
        return (*PACKAGES, Level("tests.harness.loading:swift_megatron", folders))
    return swift(release, "swift_megatron")


@pytest.fixture(scope="module")
def observe(run_ranks):
    return lambda release: run_ranks(WORKER, levels=levels(release))


@pytest.fixture(
    scope="module",
    params=["swift-4.3.1", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("4.0.0", "4.1.3", "4.2.3"))],
)
def reports(request, observe):
    found = observe(request.param)
    assert all(report["status"] == "applied" for report in found)
    return found


@pytest.mark.parametrize("case", REPAIRED)
def test_gradients_add_up_in_float32_as_asked_for_by_default(reports, case):
    for report in reports:
        for state in ("before", *(["reverted"] if case == REPAIRED[0] else [])):
            found = report[state][case]
            assert (found["asked for"], found["dtype"], found["bytes"]) == (True, "bfloat16", 2)
            assert found["off"] > 0.005
        found = report["after"][case]
        assert (found["dtype"], found["bytes"]) == ("float32", 4)
        assert found["off"] <= ROUNDING


def test_few_micro_batches_and_float16_that_asks(reports):
    for report in reports:
        for case in ("few", "float16, float32 asked for"):
            assert report["before"][case]["off"] > 1e-4
            assert report["after"][case]["off"] <= ROUNDING


def test_the_condition(reports):
    """Unknown with the user's own value under the field's name."""
    for report in reports:
        found = {case: one["occurred"] for case, one in report["after"].items()}
        assert {case for case, occurred in found.items() if occurred} == {
            *REPAIRED,
            "few",
            "float16, float32 asked for",
        }
        assert [case for case, occurred in found.items() if occurred is None] == ["under the field's name"]


def test_a_class_of_a_users_is_unknown(monkeypatch):
    """Its default may be float32."""
    module = ModuleType("swift.megatron.utils.megatron_lm_utils")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    args = SimpleNamespace(bf16=True, fp16=False, accumulate_allreduce_grads_in_fp32=True)
    for author, expected in {"megatron.core.distributed": True, "mine": None}.items():
        module.DistributedDataParallelConfig = type("Config", (), {"__module__": author})
        assert reduces_in_half(args, True) is expected


@pytest.mark.parametrize("case", SAME)
def test_where_float32_is_not_asked_for_nothing_changes(reports, case):
    """Bit for bit."""
    for report in reports:
        assert report["before"][case] | {"occurred": None} == report["after"][case] | {"occurred": None}


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["swift-4.3", "4.6.0"])
def test_releases_that_have_the_repair_agree_and_are_left_alone(observe, release):
    for report in observe(release):
        assert report["status"] == "unaffected"
        assert all(report["before"][case]["off"] <= ROUNDING for case in REPAIRED)
        assert report["after"] == report["before"]
