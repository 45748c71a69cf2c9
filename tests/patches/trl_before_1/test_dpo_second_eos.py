"""``trl-dpo-second-eos``: what TRL's own DPO trainer makes of conversations (dpo_second_eos_ranks.py)."""

from __future__ import annotations

import pytest

from tests.harness.warm import beside

WORKER = "tests.patches.trl_before_1.dpo_second_eos_ranks"
ENDED_BY_THE_TEMPLATE = {"chosen": [["w3", "<eos>"]], "rejected": [["w4", "w5", "<eos>"]]}
CUT = {"chosen": [["w3", "<eos>"]], "rejected": [["w4", "w5"]]}
TWICE = {"chosen": [["w3", "<eos>", "<eos>"]], "rejected": [["w4", "w5", "<eos>", "<eos>"]]}


@pytest.fixture(scope="module")
def report(run_ranks):
    (report,) = run_ranks(WORKER, levels=beside("trl-0.27", "trl_dpo"), ranks=1)
    assert (report["version"], report["status"]) == ("0.27.1", "applied")
    return report


def answers(found):
    return {name: found[name] for name in ("chosen", "rejected")}


@pytest.mark.parametrize("case", ["chat", "chat, streamed"])
def test_without_it_an_answer_of_a_chat_ends_twice(report, case):
    for state in ("before", "reverted"):
        assert answers(report[state][case]) == TWICE


@pytest.mark.parametrize("case", ["chat", "chat, streamed"])
def test_with_it_it_ends_as_the_template_ends_it(report, case):
    assert answers(report["after"][case]) == ENDED_BY_THE_TEMPLATE


def test_an_answer_that_is_cut_keeps_its_own_words(report):
    assert answers(report["after"]["chat, cut"]) == CUT


def test_prompts_and_plain_text_are_the_same(report):
    for state in ("after", "reverted"):
        assert report[state]["plain"] == report["before"]["plain"]
        assert report[state]["chat"]["prompt"] == report["before"]["chat"]["prompt"]
    assert answers(report["after"]["plain"]) == ENDED_BY_THE_TEMPLATE
