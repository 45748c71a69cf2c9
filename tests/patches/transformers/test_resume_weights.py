"""transformers-resume-weights: the real Trainer, resumed from a checkpoint, against a run without a stop."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import beside

WORKER = "tests.patches.transformers.resume_weights_ranks"
EXPERTS = ("Mixtral", "Mixtral, shards", "Qwen3-MoE, loaded", "best", "best, shards")
NAMES = ("Qwen2.5-VL, loaded",)
NAMES_MORE = ("Qwen2.5-VL, shards", "best, Qwen2.5-VL")
LEFT = ("without an expert", "narrower experts")
SAME = ("dense", "dense, tied")
NEWEST = (*EXPERTS, *NAMES, "loads", "loads, not a number", *LEFT, *SAME, "dense, another key")
MORE = ("Mixtral", "best, shards", "dense, tied")
"""The same loading as of the others: in one file, in several, and of a model without experts."""
RULE_COVERAGE = {
    "minimal scope": "test_where_names_are_the_models_nothing_is_asked",
    "no side effects": "test_the_model_keeps_its_parameters",
    "backward compatible": (
        "test_where_names_are_the_models_nothing_is_asked",
        "test_what_does_not_fit_is_left_and_said_once",
        "test_a_nan_is_a_value",
    ),
    "no new blocking": "because it is arithmetic on one rank, and reads files that upstream has just read",
    "bit for bit": "test_with_it_steps_are_those_without_a_stop",
    "nothing changes": (
        "test_where_names_are_the_models_nothing_is_asked",
        "test_what_does_not_fit_is_left_and_said_once",
    ),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((None, tuple(case for case in NEWEST if case not in MORE)), id="5.23"),
        pytest.param((None, NEWEST), id="5.23, all", marks=pytest.mark.exhaustive),
        pytest.param(
            ("transformers-4.57", (*NAMES, *NAMES_MORE, *SAME, "dense, another key")),
            id="4.57",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def report(request, run_ranks):
    release, cases = request.param
    (report,) = run_ranks(WORKER, *cases, levels=beside(release, "trainer"), ranks=1)
    assert report["version"].startswith(release.rpartition("-")[2] if release else "5.")
    assert report["status"] == "applied"
    return report


def of(report, state, names):
    return [report[state][name] for name in names if name in report[state]]


def test_without_it_weights_are_those_of_the_model_as_built(report):
    for found in of(report, "before", (*EXPERTS, *NAMES, *NAMES_MORE)):
        assert len(found["off"]) >= 3
        assert max(found["off"].values()) > 1e-3
        assert not found.get("losses")
    for name, found in report["reverted"].items():
        assert found == report["before"][name]


def warned(found):
    """Besides the line that reports the bug, which is logged once in a process."""
    return [line for line in found["said"] if "the bug occurs in this run, repaired" not in line]


def test_that_the_bug_is_met_is_said_once(report):
    assert sum(len(found["said"]) - len(warned(found)) for found in report["after"].values() if "said" in found) == 1
    assert report["reached"]["held"] > 0


def test_with_it_steps_are_those_without_a_stop(report):
    """Weights, moments and losses; with several files where they are several."""
    for found in of(report, "after", (*EXPERTS, *NAMES, *NAMES_MORE)):
        assert found["off"] == {}
        assert found["of"] > 10
        assert found.get("losses", True)
        assert not warned(found)
    for found in of(report, "after", ("Mixtral, shards", "Qwen2.5-VL, shards")):
        assert found["files"] > 2


def test_the_trainer_hears_of_what_is_still_missing_only(report):
    for found in of(report, "after", ("loads",)):
        assert found["off"] == {}
        assert found["loads"] == 2
        assert found["missing"] == ["lm_head.weight"]
        assert found["unexpected"] == 0


def test_the_model_keeps_its_parameters(report):
    for found in of(report, "after", ("loads", *LEFT, *SAME)):
        assert found["touched"] == ""
    for found in of(report, "after", ("loads", "dense, tied", *LEFT)):
        assert found["tied"]


def test_a_nan_is_a_value(report):
    for found in of(report, "after", ("loads, not a number",)):
        assert list(found["off"]) == ["model.layers.0.mlp.experts.gate_up_proj"]
        assert not warned(found)


def test_what_does_not_fit_is_left_and_said_once(report):
    for name in (*LEFT, "dense, another key"):
        for before, after in zip(of(report, "before", [name]), of(report, "after", [name]), strict=True):
            assert {**after, "said": [], "asked": 0} == {**before, "said": [], "asked": 0}
            assert after["off"]
            said = after["said"][::2]  # the checkpoint is loaded twice
            assert [line.split(":")[0] for line in said] == ["transformers-resume-weights"] * (name in LEFT)


def test_where_names_are_the_models_nothing_is_asked(report):
    for name in SAME:
        for before, after in zip(of(report, "before", [name]), of(report, "after", [name]), strict=True):
            assert after == before
            assert (after["off"], after["loads"], after["asked"]) == ({}, 1, 0)
