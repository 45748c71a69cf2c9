"""openrlhf-own-sampling: what OpenRLHF's own executor asks vLLM for, for each sample of a prompt."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import beside

RULE_COVERAGE = {
    "minimal scope": "test_alike_or_alone_nothing_changes",
    "no side effects": "test_the_parameters_that_were_given_stay_as_they_are",
    "backward compatible": "test_alike_or_alone_nothing_changes",
    "no new blocking": "because it is a copy of one small object",
    "The patch does not change": "because nothing but the parameters is copied",
    "nothing changes": "test_alike_or_alone_nothing_changes",
}
LIMIT, NEW, ANSWER = 64, 8, 4
RELEASES = ["0.10.2", "0.11.2"]


@pytest.fixture(scope="module", params=[*RELEASES, pytest.param("0.11.1", marks=pytest.mark.exhaustive)])
def report(request, run_ranks):
    levels = beside(f"openrlhf-{request.param}", "openrlhf")
    (found,) = run_ranks("rlhf_patches.patches.openrlhf.proofs.own_sampling_ranks", levels=levels, ranks=1)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", ["lengths", "without max_new_tokens"])
def test_each_sample_begins_with_its_whole_observation(report, case):
    lengths = {"a": 20, "b": 40, "c": 30}
    asked = report["after"][case]["asked"]
    assert {letter: turns[0]["tokens"] for letter, turns in asked.items()} == lengths
    assert {letter: turns[0]["max_tokens"] for letter, turns in asked.items()} == {"a": 44, "b": 24, "c": 34}
    for state in ("before", "reverted"):
        asked = report[state][case]["asked"]
        assert {letter: turns[0]["tokens"] for letter, turns in asked.items()} == {"a": 20, "b": 20, "c": 20}


def test_a_sample_that_begins_late_leaves_room_as_well(report):
    """Its observation has 60 of 64 tokens, and 8 are to be left; the other one has asked for less by then."""
    assert report["after"]["slow"]["asked"]["b"][0]["max_tokens"] == NEW
    assert report["before"]["slow"]["asked"]["b"][0]["max_tokens"] != NEW


def test_an_environments_temperature_is_its_own_samples(report):
    second = {letter: turns[1]["temperature"] for letter, turns in report["after"]["colder"]["asked"].items()}
    assert second == {"a": 1.0, "b": 0.1, "c": 1.0}
    second = {letter: turns[1]["temperature"] for letter, turns in report["before"]["colder"]["asked"].items()}
    assert second != {"a": 1.0, "b": 0.1, "c": 1.0}


def test_the_parameters_that_were_given_stay_as_they_are(report):
    for case in ("lengths", "colder"):
        assert report["after"][case]["theirs"] == {"max_tokens": NEW, "temperature": 1.0, "logprobs": None}
    assert report["before"]["colder"]["theirs"]["temperature"] == 0.1


@pytest.mark.parametrize("case", ["alike", "one"])
def test_alike_or_alone_nothing_changes(report, case):
    for part in ("asked", "tokens", "ranges"):
        assert report["before"][case][part] == report["after"][case][part] == report["reverted"][case][part]
