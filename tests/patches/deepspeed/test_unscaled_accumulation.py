"""``deepspeed-unscaled-accumulation`` on two gloo ranks, against float64 (accumulation_scale_ranks.py).

float32 through four layers: 1e-5 of the gradient's norm. bfloat16 rounds parameters by 2**-9 of their own size, and
activations too: seen up to 0.025. Four micro-batches that are not divided are off by 2 and more.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhf_patches.patches.deepspeed._conditions import counts_several_times
from tests.harness.forkserver import beside

WORKER = "tests.patches.deepspeed.accumulation_scale_ranks"
NAME = "deepspeed-unscaled-accumulation"
TOLERANCE = {"pipeline, bfloat16": 0.05, "no_sync, bfloat16": 0.05}
FLOAT32 = 1e-5
WRONG = (
    "pipeline",
    "pipeline, ZeRO-1",
    "pipeline, bfloat16",
    "pipeline, tied",
    "pipeline, one stage",
    "no_sync",
    "no_sync, ZeRO-1",
    "no_sync, bfloat16",
)
# In this order: after a pipeline an engine takes the pipeline's groups, which are of all ranks with one stage.
RIGHT = (
    "no_sync, one micro-batch",
    "no_sync, caller's",
    "engine",
    "engine, ZeRO-1",
    "engine, ZeRO-2",
    "engine, caller's",
    "pipeline, one micro-batch",
)
RULE_COVERAGE = {
    "minimal scope": "test_what_was_divided_once_stays_as_it_was",
    "no side effects": "test_unscaled_micro_batches_are_divided",  # the engine's attributes
    "backward compatible": "test_what_was_divided_once_stays_as_it_was",
    "no new blocking": "because one condition in a function of one rank asks less; no lock, no collective",
    "as before 0.16.0": "test_unscaled_micro_batches_are_divided",
    "losses are as released": "because the condition goes on asking for DeepCompile, which needs a GPU",
}


@pytest.fixture(scope="module")
def reports(run_ranks):
    """Of both ranks: each case without the patch, with it, and after it was reverted."""
    found = run_ranks(WORKER, NAME, *WRONG, *RIGHT, levels=beside("deepspeed-0.18.2", "deepspeed"))
    assert all(report["status"] == "applied" for report in found)
    return found


@pytest.mark.parametrize("case", WRONG)
def test_unscaled_micro_batches_are_divided(reports, case):
    for report in reports:
        before, after = report["before"][case], report["after"][case]
        assert before["error"] > 2
        assert after["error"] <= TOLERANCE.get(case, FLOAT32)
        assert after["norm"] is None or abs(after["norm"] - 1) <= TOLERANCE.get(case, FLOAT32)
        assert after["attributes"] == before["attributes"]
        assert report["reverted"][case]["error"] == before["error"]


@pytest.mark.parametrize("case", RIGHT)
def test_what_was_divided_once_stays_as_it_was(reports, case):
    for report in reports:
        assert report["before"][case] == report["after"][case] == report["reverted"][case]
        # These releases' ZeRO-2 has a bug of its own: deepspeed-zero2-accumulation.
        assert report["after"][case]["error"] <= FLOAT32 or case == "engine, ZeRO-2"


def test_a_run_is_told_whether_it_was_affected(reports):
    """Of a pipeline in its last stage, where the loss is; in `no_sync()` once for each micro-batch but the last."""
    unsynced = 3 * sum(case.startswith("no_sync") for case in WRONG)
    staged = 4 * sum(case.startswith("pipeline") and case != "pipeline, one stage" for case in WRONG)
    for rank, report in enumerate(reports):
        reached = report["reached"]
        assert reached["asked"] == reached["calls"] > reached["held"] == unsynced + 4 + staged * rank
        assert reached["least"] == reached["most"] == 4


@pytest.mark.parametrize("case", [case for case in WRONG if case.startswith("pipeline")])
def test_the_loss_that_a_pipeline_reports_is_right_without_it_too(reports, case):
    for report in reports:
        for state in ("before", "after"):
            assert report[state][case]["losses off"] <= (0.01 if "bfloat16" in case else FLOAT32)


def test_what_is_told_of_an_engine():
    def told(scale=True, missing=None, **change):
        engine = {
            "scale_wrt_gas": None,
            "gradient_accumulation_steps": lambda: 4,
            "enable_backward_allreduce": True,
            "inside_no_sync_ctxt": True,
            "is_deepcompile_active": lambda: False,
            **change,
        }
        engine.pop(missing, None)
        return counts_several_times(SimpleNamespace(**engine), scale)

    assert told() == told(False, scale_wrt_gas=True) == told(missing="is_deepcompile_active") == 4.0
    assert told(enable_backward_allreduce=False, inside_no_sync_ctxt=False) == 4.0
    assert told(False) is told(scale_wrt_gas=False) is told(inside_no_sync_ctxt=False) is False
    assert told(gradient_accumulation_steps=lambda: 1) is False
    assert told(is_deepcompile_active=lambda: True) is None
    assert told(missing="is_deepcompile_active", is_deepcompile_enabled=lambda: True) is None
    for name in ("scale_wrt_gas", "gradient_accumulation_steps", "inside_no_sync_ctxt"):
        assert told(missing=name, enable_backward_allreduce=True) is None
    assert told(missing="enable_backward_allreduce") is None
