"""``swift-async-rollout-lora``: whose completions an asynchronous rollout server hands out.

What is observed is in async_rollout_lora_ranks.py: as released, patched and reverted, in one process. The engine below
ms-swift's completes with one token, which says which weights it is from.
"""

from __future__ import annotations

import pytest

from tests.harness.forkserver import swift
from tests.harness.vllm_for_swift import BASE
from tests.patches.swift.async_rollout_lora_ranks import LEARNED, LOADED

RULE_COVERAGE = {
    "minimal scope": "test_other_engines_are_not_even_asked",
    "no side effects": "because it reads the engine, and hands its own request to the call that upstream makes",
    "backward compatible": ("test_other_engines_are_not_even_asked", "test_what_the_caller_names_is_kept"),
    "known": "test_other_engines_are_not_even_asked",
    "no new blocking": "because what it awaits is an answer of the engine that the request itself goes to next",
    "is kept": "test_what_the_caller_names_is_kept",
    "as before": ("test_before_the_first_update_it_is_the_base_model", "test_other_engines_are_not_even_asked"),
}

AFFECTED = ["swift-4.3", pytest.param("swift-3.12", marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module")
def observe(run_ranks):
    def run(folder):
        (report,) = run_ranks(
            "tests.patches.swift.async_rollout_lora_ranks", levels=swift(folder, "swift_engine"), ranks=1
        )
        return report

    return run


@pytest.mark.parametrize("folder", AFFECTED)
def test_rollouts_are_of_the_adapter_that_was_sent_last(observe, folder):
    report = observe(folder)
    assert report["status"] == "applied"
    for state in ("before", "reverted"):
        assert report[state]["after an update"] == report[state]["after another"] == [BASE, BASE]
        assert report[state]["in turns"] == BASE
        assert {adapter for _, _, adapter in report[state]["requests"]} == {None}
    after = report["after"]
    assert after["after an update"] == [LEARNED, LEARNED]
    assert after["after another"] == [LEARNED + 1, LEARNED + 1]
    assert after["in turns"] == LEARNED + 1
    assert [adapter for _, _, adapter in after["requests"]] == [None] * 2 + [LOADED] * 6
    of = [[[name, prompt] for name, prompt, _ in report[state]["requests"]] for state in ("before", "after")]
    assert of[0] == of[1], "and nothing else about a request is another"


@pytest.mark.parametrize("folder", AFFECTED)
def test_the_condition(observe, folder):
    """Two batches after an update, and two turns; unknown of vLLM's first engine alone."""
    reached = observe(folder)["reached"]
    assert reached["held"] == 4
    assert reached["calls"] - reached["asked"] == 1


@pytest.mark.parametrize("folder", AFFECTED)
def test_before_the_first_update_it_is_the_base_model(observe, folder):
    report = observe(folder)
    for state in ("before", "after"):
        assert report[state]["before the first update"] == [BASE, BASE]


@pytest.mark.parametrize("folder", AFFECTED)
def test_what_the_caller_names_is_kept(observe, folder):
    report = observe(folder)
    for state in ("before", "after"):
        assert report[state]["one that is named"] == 55


@pytest.mark.parametrize("folder", AFFECTED)
def test_other_engines_are_not_even_asked(observe, folder):
    """That of `swift deploy`, one without LoRA, and vLLM's first one, which has no such question."""
    report = observe(folder)
    for name in ("another engine", "no LoRA", "vLLM's first engine"):
        for state in ("before", "after"):
            assert report[state][name] == BASE
            assert report[state][f"{name}, asked"] == 0


@pytest.mark.exhaustive
def test_the_release_that_has_the_repair_agrees_and_is_left_alone(observe):
    report = observe(None)
    assert report["status"] == "unaffected"
    right = observe("swift-4.3")["after"]
    for name in ("before the first update", "after an update", "after another", "in turns", "requests"):
        assert report["before"][name] == right[name]
    assert report["after"] == report["before"]
