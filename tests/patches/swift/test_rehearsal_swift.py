"""Rehearsals of ms-swift's Megatron trainers at their own training step, on two data-parallel ranks."""

from __future__ import annotations

import functools

import pytest

from tests.harness.forkserver import swift

WORKER = "tests.patches.swift.rehearsal_megatron_ranks"
COPIES, WEIGHTS, MEAN, NORM = "copies of a micro-batch", "micro-batch weights", "mean over ranks", "gradient norm"
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def run(run_ranks):
    @functools.cache
    def run(*cases):
        levels = swift(None, "swift_megatron")
        first, _ = run_ranks(WORKER, *cases, levels=levels, ranks=2, TORCHDYNAMO_DISABLE="1")
        assert set(first) == set(cases)
        found = {}
        for case, results in first.items():
            rows = {row["relation"]: (row["verdict"], row["measured"]) for row in results["relations"]}
            assert {row["of"] for row in results["relations"]} == {"GPTModel"}
            found[case] = results["status"], rows
        return found

    return run


@exhaustive
def test_a_right_step_of_swift_holds(run):
    found = run("SFT", "DPO")
    for case, (status, rows) in found.items():
        assert status == 0, (case, rows)
        assert {name for name, (verdict, _) in rows.items() if verdict == "not checked"} == {"gradient across ranks"}
        assert {rows[name] for name in (COPIES, MEAN)} == {("holds", "1.000")}
        assert rows[NORM] == ("holds", "1.000 x")
    assert found["SFT"][1][WEIGHTS] == ("holds", "[0.333 0.315 0.352]"), "the trained tokens are 18, 17 and 19"
    assert found["DPO"][1][WEIGHTS] == ("holds", "[0.333 0.333 0.333]")


def test_a_fault_in_a_step_of_swift(run):
    """The forward step clears the gradient."""
    status, rows = run("SFT that clears")["SFT that clears"]
    assert status == 1
    assert {name for name, (verdict, _) in rows.items() if verdict == "deviates"} == {COPIES, WEIGHTS}
    assert rows[WEIGHTS] == ("deviates", "[0.000 0.000 0.352]")
