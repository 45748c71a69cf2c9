"""trl-chunked-nll-zero3 in full runs of SFTTrainer, two gloo ranks, real ZeRO-3 (chunked_nll_zero3_training_ranks.py).

Ranks never have the same number of chunks. In eager mode DeepSpeed discovers that the head's weight is read, gathers
it, and nothing fails: the patch must change nothing. With `torch_compile` it does not see that, and the unpatched
release fails in a full run.
"""

from __future__ import annotations

import itertools
import re

import pytest

from tests.harness.forkserver import TRL

# Of each, what is compiled logs what the first one logs.
EAGER = (("lora",), ())
LORA = (("lora",), ("compiled-lora",))
OTHERS = (("full", "tied"), ("compiled",))
exhaustive = pytest.mark.exhaustive
WORKER = "tests.patches.trl.chunked_nll_zero3_training_ranks"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(EAGER, id="eager LoRA"),
        pytest.param(LORA, id="LoRA", marks=exhaustive),
        pytest.param(OTHERS, id="others", marks=exhaustive),
    ],
)
def runs(request):
    """Those in eager mode, and those with `torch_compile`."""
    return request.param


@pytest.fixture(scope="module")
def reports(run_ranks, runs, compiled_runs_fail):
    eager, compiled = runs
    patched = (*eager, *compiled) if compiled_runs_fail else eager
    return run_ranks(WORKER, *(f"unpatched:{run}" for run in eager), *(f"patched:{run}" for run in patched), levels=TRL)


@pytest.fixture(scope="module")
def compiled_runs_fail(gathers_per_chunk):
    return gathers_per_chunk


def test_runs_that_work_are_bit_for_bit_the_same(reports, runs):
    """Losses, metrics, gradient norms, parameters at the end, and every collective; LoRA has a frozen head."""
    for report, run in itertools.product(reports, runs[0]):
        unpatched, patched = (dict(report[f"{how}:{run}"]) for how in ("unpatched", "patched"))
        for found in (unpatched, patched):
            del found["seconds"]
        assert unpatched == patched, run
        assert len(patched["logged"]) == 2


@exhaustive
def test_unpatched_a_compiled_run_fails(run_ranks, compiled_runs_fail):
    """As issue #6696 has it: ranks with different numbers of chunks meet in different collectives.

    NCCL waits then. gloo waits as well, or ends the process, if it finds that the other rank sends another size.
    """
    if not compiled_runs_fail:
        pytest.skip("DeepSpeed 0.18.4 discovers the read in a compiled run too")
    try:
        reports = run_ranks(WORKER, "unpatched:compiled-lora", levels=TRL)
        outcome = " ".join(report["unpatched:compiled-lora"].get("failed", "") for report in reports)
    except RuntimeError as error:
        outcome = str(error)
    assert re.search("collective mismatch|Timed out waiting|Connection (closed|reset)", outcome), outcome


def test_patched_a_compiled_run_trains(reports, runs, compiled_runs_fail):
    """Logging the eager run's numbers, bit for bit, and with the same collectives and parameters on both ranks."""
    if not compiled_runs_fail:
        pytest.skip("DeepSpeed 0.18.4 discovers the read in a compiled run too")
    (eager, *_), compiled = runs
    if not compiled:
        pytest.skip("this one is in eager mode only")
    (run,) = compiled
    for report in reports:
        found = report[f"patched:{run}"]
        assert "failed" not in found, found["failed"]
        assert found["logged"] == report[f"unpatched:{eager}"]["logged"]
    one, other = (report[f"patched:{run}"] for report in reports)
    assert one["collectives"] == other["collectives"]
    assert one["final"] == other["final"]
