"""``deepspeed-pipeline-accumulation`` on gloo ranks, a stage each, against float64 (accumulation_scale_ranks.py).

float32 through four or six layers: 1e-5 of the gradient's norm. bfloat16 rounds parameters by 2**-9 of their own size,
and activations too: seen up to 0.025. A quarter of a gradient is off by 0.75.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rlhf_patches.patches.deepspeed._conditions import divided_again
from tests.harness.forkserver import beside

WORKER = "tests.patches.deepspeed.accumulation_scale_ranks"
NAME = "deepspeed-pipeline-accumulation"
FLOAT32, BFLOAT16 = 1e-5, 0.05
QUARTERED = ("pipeline", "pipeline, ZeRO-1", "pipeline, bfloat16")
WRONG = (*QUARTERED, "pipeline, clipped", "pipeline, tied", "pipeline, tied, ZeRO-1")
RIGHT = (
    *("pipeline, one micro-batch", "pipeline, one stage"),
    *("no_sync", "engine", "engine, ZeRO-1", "engine, caller's", "engine, user's own name"),
)
WITH_ZERO1 = ("pipeline, ZeRO-1", "pipeline, bfloat16")
RULE_COVERAGE = {
    "minimal scope": "test_without_stages_nothing_changes",
    "no side effects": "test_earlier_stages_have_their_whole_gradient",  # the engine's attributes
    "backward compatible": "test_without_stages_nothing_changes",
    "no new blocking": "because each stage asks itself whether it is the last; no lock, no collective",
    "Engines without stages and pipelines of one stage are not affected": "test_without_stages_nothing_changes",
    "Only the last stage divides": "test_earlier_stages_have_their_whole_gradient",
    "with and without the patch": "because DeepSpeed itself raises without ZeRO, with the patch and without",
    "only with ZeRO-1": "because DeepSpeed itself raises without ZeRO, with the patch and without",
}


def tolerance(case):
    return BFLOAT16 if "bfloat16" in case else FLOAT32


@pytest.fixture(scope="module")
def reports(run_ranks):
    """Of both ranks: each case without the patch, with it, and after it was reverted."""
    found = run_ranks(WORKER, NAME, *WRONG, *RIGHT, levels=beside("deepspeed-0.18.9", "deepspeed"))
    assert all(report["status"] == "applied" for report in found)
    return found


@pytest.mark.parametrize("case", WRONG)
def test_earlier_stages_have_their_whole_gradient(reports, case):
    assert reports[0]["before"][case]["error"] > 0.5
    for report in reports:
        before, after = report["before"][case], report["after"][case]
        assert after["error"] <= tolerance(case)
        assert after["norm"] is None or abs(after["norm"] - 1) <= tolerance(case)
        assert after["losses off"] <= (0.01 if "bfloat16" in case else FLOAT32)
        assert after["attributes"] == before["attributes"]
        assert report["reverted"][case]["error"] == pytest.approx(before["error"])


@pytest.mark.parametrize("case", QUARTERED)
def test_without_it_the_first_of_two_stages_has_a_quarter(reports, case):
    first, last = (report["before"][case] for report in reports)
    assert first["times"] == pytest.approx(0.25, rel=tolerance(case))
    assert last["times"] == pytest.approx(1, rel=tolerance(case))


@pytest.mark.parametrize("case", RIGHT)
def test_without_stages_nothing_changes(reports, case):
    for report in reports:
        assert report["before"][case] == report["after"][case] == report["reverted"][case]
        assert report["after"][case]["error"] <= FLOAT32


def test_a_run_is_told_whether_it_was_affected(reports):
    """In the first stage, in each micro-batch of a case that is wrong; in nothing else, and never in the last one."""
    first, last = (report["reached"] for report in reports)
    assert first["asked"] == first["calls"] > first["held"] == 4 * len(WRONG)
    assert first["least"] == first["most"] == 0.25
    assert last["asked"] == last["calls"] > last["held"] == 0


@pytest.mark.exhaustive
def test_of_three_stages_the_first_has_a_sixteenth(run_ranks):
    cases = ("pipeline", "pipeline, tied, ZeRO-1")
    found = run_ranks(WORKER, NAME, *cases, levels=beside("deepspeed-0.18.9", "deepspeed"), ranks=3)
    assert [report["before"]["pipeline"]["times"] for report in found] == pytest.approx([1 / 16, 1 / 4, 1])
    for report in found:
        for case in cases:
            assert report["after"][case]["error"] <= FLOAT32


@pytest.mark.exhaustive
@pytest.mark.parametrize("release", ["trl-1.5", "deepspeed-0.18.5"])
def test_other_releases_that_have_it(run_ranks, release):
    """0.18.4 beside TRL 1.5, and 0.18.5."""
    found = run_ranks(WORKER, NAME, *WITH_ZERO1, levels=beside(release, "deepspeed"))
    for case in WITH_ZERO1:
        assert found[0]["before"][case]["error"] > 0.5
        for report in found:
            assert (report["status"], report["after"][case]["error"] <= tolerance(case)) == ("applied", True)


@pytest.mark.exhaustive
def test_the_newest_release_is_right_and_left_alone(run_ranks):
    found = run_ranks(WORKER, NAME, *WRONG, levels=beside(None, "deepspeed"))
    for report in found:
        assert report["status"] == "unaffected"
        for case in WRONG:
            assert report["before"][case]["error"] <= tolerance(case)


def test_what_is_told_of_an_engine(monkeypatch):
    class Pipeline(SimpleNamespace):
        """DeepSpeed's, by the name under which it is looked up."""

    def told(grad=1, kind=Pipeline, missing=None, **change):
        engine = {"gradient_accumulation_steps": lambda: 4, "num_stages": 3, "stage_id": 0, **change}
        engine.pop(missing, None)
        return divided_again(kind(**engine), grad)

    module = "deepspeed.runtime.pipe.engine"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(PipelineEngine=Pipeline))
    assert [told(stage_id=stage) for stage in range(3)] == [1 / 16, 1 / 4, False]
    assert told(None) is told(kind=SimpleNamespace) is told(_scale_wrt_gas=False) is False
    assert told(gradient_accumulation_steps=lambda: 1) is False
    for name in ("gradient_accumulation_steps", "num_stages", "stage_id"):
        assert told(missing=name) is None
    monkeypatch.delitem(sys.modules, module)
    assert told() is False
