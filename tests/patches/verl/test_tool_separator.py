"""``verl-tool-separator`` on verl's tool agent loop, against the chat template of it all (tool_separator_ranks.py)."""

from __future__ import annotations

import pytest

from tests.harness import forkserver, unpacked
from tests.patches.verl.tool_separator_ranks import LIMITS, RESULTS, RIGHT, SEPARATED

RULE_COVERAGE = {
    "minimal scope": ("test_the_rest_is_as_released", "test_a_template_is_asked_once"),
    "no side effects": "test_what_is_asked_is_untouched",
    "backward compatible": "test_the_rest_is_as_released",
    "no new blocking": "because it renders five short conversations; no lock, no collective",
    "Nothing changes": "test_the_rest_is_as_released",
    "the turn follows as before": "test_the_rest_is_as_released",
}
WORKER = "tests.patches.verl.tool_separator_ranks"
OLDER = ("0.5.0", "0.6.0", "0.6.1")
"""Those that are fetched."""
STATES = ("before", "after", "reverted")


def levels(release):
    if release in OLDER:
        return forkserver.verl_agent_loop(unpacked.folders(f"verl=={release}"))
    return forkserver.verl_agent_loop(release)


@pytest.fixture(
    scope="module",
    params=["0.8", "0.7.0", *(pytest.param(release, marks=pytest.mark.exhaustive) for release in (*OLDER, "0.7"))],
)
def report(request, run_ranks):
    (report,) = run_ranks(WORKER, levels=levels(request.param), ranks=1)
    assert report["status"] == "applied"
    assert report["version"].startswith(request.param)
    return report


def is_the_templates(conversation, whole):
    """The template ends the last turn with its separator, which nobody generates."""
    return whole.startswith(conversation["prompt"] + conversation["response"])


@pytest.mark.parametrize("template", SEPARATED)
def test_a_conversation_is_the_templates(report, template):
    whole = report["after"]["whole"][template]
    for state in ("before", "reverted"):
        assert not is_the_templates(report[state][template], whole), "without the patch: no separator"
    found = report["after"][template]
    assert is_the_templates(found, whole)
    assert len(whole) - len(found["prompt"] + found["response"]) <= len("<|end|>")
    assert all(whole.startswith(asked) for asked in found["asked"]), "the server too is asked with it"


@pytest.mark.parametrize("template", SEPARATED)
def test_only_what_was_generated_is_trained(report, template):
    before, found = report["before"][template], report["after"][template]
    assert found["generated"] == before["generated"]
    assert len(found["tokens"]) == len(found["mask"])
    added = len(found["tokens"]) - len(before["tokens"])
    assert added == len(RESULTS) * (2 if template == "two newlines" else 1)
    if report["version"] == "0.5.0":
        return  # which has no log-probabilities
    assert len(found["scores"]) == len(found["mask"])
    assert all((score == 0) == (one == 0) for score, one in zip(found["scores"], found["mask"], strict=True))
    assert [score for score in found["scores"] if score] == [score for score in before["scores"] if score]


def test_a_users_turn_is_the_templates(report):
    if "a user" not in report["before"]:
        assert report["version"] in ("0.5.0", "0.8.0"), "there is no such turn"
        return
    whole = report["after"]["whole"]["a user"]
    assert not is_the_templates(report["before"]["a user"], whole)
    assert is_the_templates(report["after"]["a user"], whole)
    assert report["after"]["a user"]["mask"].count(1) == report["before"]["a user"]["mask"].count(1)


def test_with_a_processor_it_is_the_templates(report):
    if "a processor" not in report["before"]:
        assert report["version"] in ("0.5.0", "0.6.1"), "which has none, or repeats the system prompt"
        return
    whole = report["after"]["whole"]["ChatML"]
    assert not is_the_templates(report["before"]["a processor"], whole)
    assert is_the_templates(report["after"]["a processor"], whole)


REST = (
    *(*RIGHT, "answers end in words", "closed by words", "cannot be asked", "a newline of one's own"),
    *("content left out", "one turn", "stopped elsewhere", "without its end", "gpt-oss", "gemma4"),
)


@pytest.mark.parametrize("case", REST)
def test_the_rest_is_as_released(report, case):
    if case not in report["before"]:
        assert case in ("gpt-oss", "gemma4", "a newline of one's own"), "a format, or a method, that came later"
    for state in STATES:
        assert report[state].get(case) == report["before"].get(case)
    for template in RIGHT:
        assert is_the_templates(report["before"][template], report["before"]["whole"][template])
    if "a newline of one's own" in report["before"]:
        assert is_the_templates(report["before"]["a newline of one's own"], report["before"]["whole"]["ChatML"])


def test_the_separator_counts_for_the_length_of_the_response(report):
    for state, more in (("before", 0), ("after", 1), ("reverted", 0)):
        for masks, limit in zip(report[state]["limits"], LIMITS, strict=True):
            assert (0 in masks) == (more < limit)


def test_a_template_is_asked_once(report):
    first, again, another = report["before"]["rendered"]
    assert report["after"]["rendered"] == [first + 5, again, another + 5]


def test_what_is_asked_is_untouched(report):
    assert [report[state]["touched"] for state in STATES] == [None] * len(STATES)


def test_it_reports_the_turns_without_their_separator(report):
    """Unknown where the template has several, or cannot be asked."""
    turns = len(RESULTS)
    known = ("no separator", "before each turn", "answers end in words")
    for template, found in report["after"]["reported"].items():
        missing = turns if template in SEPARATED else 0
        assert found == [turns if missing or template in known else 0, missing], template


@pytest.mark.parametrize("fixed", ["0.9.1", pytest.param("0.9.0", marks=pytest.mark.exhaustive)])
def test_a_release_that_has_it_repaired_makes_the_same_tokens(report, run_ranks, fixed):
    beside = None if fixed == "0.9.1" else unpacked.folders(f"verl=={fixed}")
    (right,) = run_ranks(WORKER, "--yardstick", levels=forkserver.verl_agent_loop(beside), ranks=1)
    assert (right["status"], right["version"]) == ("unaffected", fixed)
    assert right["before"] == right["after"] == right["reverted"]
    found, expected = report["after"], right["after"]
    assert found["limits"] == expected["limits"]
    for template in ("ChatML", "no system prompt"):
        assert all(found[template][part] == expected[template][part] for part in ("asked", "tokens", "mask", "turns"))
        assert found[template]["scores"] == expected[template]["scores"] or report["version"] == "0.5.0"
