"""``deepspeed-muon-offload``, an advice: real ZeRO-1 and 2, against Muon's definition (muon_offload_ranks.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.deepspeed._muon_conditions import is_on_the_cpu
from tests.harness.forkserver import beside
from tests.patches.deepspeed import muon_offload_ranks

WORKER = muon_offload_ranks.__name__
STEPS = 3
RULE_COVERAGE = {
    "minimal scope": "because nothing is applied: an advice",
    "no side effects": "because nothing is applied: an advice",
    "backward compatible": "test_on_the_cpu_it_is_not_muon",
    "no new blocking": "because nothing is applied: an advice",
}


@pytest.fixture(scope="module", params=["0.18.9", pytest.param("0.18.2", marks=pytest.mark.exhaustive)])
def reports(request, run_ranks):
    found = run_ranks(WORKER, *muon_offload_ranks.CASES, levels=beside(f"deepspeed-{request.param}", "deepspeed"))
    assert {each["status"] for each in found} == {"advice"}
    return found


@pytest.mark.parametrize("case", ["stage 1", "stage 2", "scattered"])
def test_on_the_cpu_it_is_not_muon(reports, case):
    for report in reports:
        assert report[case]["error"] > 0.5
        assert report[case]["counts"] == [STEPS, STEPS]


def test_the_advised_one_is_right(reports):
    for report in reports:
        assert report["on the device"]["error"] < 0.12  # Newton-Schulz in bfloat16
        assert report["on the device"]["counts"] == [0, STEPS]
        assert report["on the device"]["said"] == []


def test_a_run_is_told_once(reports):
    assert [len(report["stage 1"]["said"]) for report in reports] == [1, 0]  # on rank 0
    assert reports[0]["stage 2"]["said"] == []


def test_later_releases_refuse_what_is_scattered(run_ranks):
    for report in run_ranks(WORKER, "stage 2", "scattered", levels=beside("deepspeed-0.19.7", "deepspeed")):
        assert report["status"] == "advice"
        assert report["stage 2"]["error"] > 0.5
        assert report["stage 2"]["counts"] == [STEPS, STEPS]
        assert "does not support optimizer offload" in report["scattered"]["raised"]


def test_the_newest_release_is_right(run_ranks):
    for report in run_ranks(WORKER, "stage 1", "stage 2", "scattered", levels=beside(None, "deepspeed")):
        assert report["status"] == "unaffected"
        assert max(report[case]["error"] for case in ("stage 1", "stage 2", "scattered")) < 1e-3


def test_which_optimizers_meet_it():
    def of(module="deepspeed.runtime.zero.stage_1_and_2", muon="MuonWithAuxAdam", use=True, offload=True):
        made = type("Zero", (), {"__module__": module})()
        made.cpu_offload, made.optimizer = offload, type(muon, (), {})()
        made.bit16_groups = [[SimpleNamespace()], [SimpleNamespace(use_muon=use)]]
        return is_on_the_cpu(made)

    assert of() is True
    assert of(module="deepspeed.runtime.zenflow.zenflow_stage_1_and_2") is None
    assert of(muon="AdamW") is of(use=False) is of(offload=False) is False
