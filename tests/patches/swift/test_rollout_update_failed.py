"""``swift-rollout-update-failed``: what the rollout server answers when its weights are not the trainer's.

What is observed is in rollout_update_failed_ranks.py, as released, patched and reverted, in one process. Completions
are the number of updates that the weights of the worker have had.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import swift

WORKER = "rlhf_patches.patches.swift.proofs.rollout_update_failed_ranks"
RULE_COVERAGE = {
    "minimal scope": "test_where_nothing_raises_nothing_changes",
    "no side effects": "because what it keeps is a text, beside the engine and not on it",
    "backward compatible": ("test_where_nothing_raises_nothing_changes", "test_other_calls_are_answered_as_they_were"),
    "no new blocking": "test_no_answer_is_waited_for_in_vain",
    "nothing changes": "test_where_nothing_raises_nothing_changes",
    "The answers to other calls": "test_other_calls_are_answered_as_they_were",
}

CASES = ["one worker", "two workers", "asynchronous"]


@pytest.fixture(
    scope="module",
    params=[None, pytest.param("swift-3.12", marks=pytest.mark.exhaustive)],
)
def report(request, run_ranks):
    (found,) = run_ranks(WORKER, levels=swift(request.param, "swift_engine"), ranks=1)
    assert found["status"] == "applied"
    return found


@pytest.mark.parametrize("case", CASES)
def test_rollouts_from_weights_that_are_not_the_policys_are_refused(report, case):
    for state in ("before", "reverted"):
        stale = report[state][case]["failed"]
        assert len(stale) == 2
        assert stale[-1] == 2, "of three updates"
        assert report[state][case]["again"] == stale
        assert not isinstance(report[state][case]["not processed"], str)
    for name, called in (
        ("failed", "update_flattened_params"),
        ("again", "update_flattened_params"),
        ("not processed", "process_weights_after_loading"),
    ):
        answer = report["after"][case][name]
        assert answer.startswith("HTTPException: ")
        assert f"the weights are not the policy's: {called} failed (KeyError: 'model.norm.weight')" in answer


@pytest.mark.parametrize("case", CASES)
def test_a_new_trainer_starts_anew(report, case):
    assert report["after"][case]["a new trainer"] == report["before"][case]["a new trainer"]
    assert len(report["after"][case]["a new trainer"]) == 2


@pytest.mark.parametrize("case", CASES)
def test_why_a_rollout_itself_failed_is_said(report, case):
    assert report["before"][case]["too long"] == "TypeError: 'NoneType' object is not iterable"
    assert report["after"][case]["too long"].endswith(
        "failed in a rollout worker: ValueError: a prompt that is too long"
    )


@pytest.mark.parametrize("case", CASES)
def test_where_nothing_raises_nothing_changes(report, case):
    for name in ("right", "after that"):
        assert report["after"][case][name] == report["before"][case][name] == [1, 1]


@pytest.mark.parametrize("case", CASES)
def test_other_calls_are_answered_as_they_were(report, case):
    for name in ("cache", "another call"):
        assert report["after"][case].get(name) == report["before"][case].get(name)
    assert report["after"][case]["after another call"] == [1, 1]


@pytest.mark.parametrize("case", CASES)
def test_no_answer_is_waited_for_in_vain(report, case):
    assert report["after"][case]["ended"]
    assert "hung" not in report["after"][case].values()
