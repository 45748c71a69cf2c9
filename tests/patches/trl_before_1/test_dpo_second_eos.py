"""``trl-dpo-second-eos``: what TRL's own DPO trainer makes of conversations (dpo_second_eos_ranks.py)."""

from __future__ import annotations

import pytest

from tests.harness.forkserver import beside

RULE_COVERAGE = {
    "minimal scope": "test_prompts_and_plain_text_are_the_same",
    "no side effects": "test_tokenizer_and_data_set_are_as_they_were",
    "backward compatible": "test_a_subclass_has_what_it_had",
    "no new blocking": "because it takes no lock and enters no collective",
    "as before": ("test_prompts_and_plain_text_are_the_same", "test_a_subclass_has_what_it_had"),
    "before, and so do": "test_a_subclass_has_what_it_had",
    "writes no end": "test_a_template_that_writes_no_end_keeps_the_trainers",
}
WORKER = "rlhf_patches.patches.trl.proofs.dpo_second_eos_ranks"
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


@pytest.mark.parametrize("case", ["chat", "chat, streamed", "plain"])
def test_tokenizer_and_data_set_are_as_they_were(report, case):
    """But for what the trainer does to them itself."""
    assert report["after"][case]["touched"] == report["before"][case]["touched"]
    assert len(report["before"][case]["touched"].splitlines()) < 10, "not all that differs would be listed"


def test_rows_of_two_processes_are_told_too(report):
    assert answers(report["after"]["chat, two processes"]) == {
        name: rows * 2 for name, rows in ENDED_BY_THE_TEMPLATE.items()
    }


@pytest.mark.parametrize("case", ["chat, by a subclass", "chat, by a subclass on top", "chat, in place of TRL's own"])
def test_a_subclass_has_what_it_had(report, case):
    """Its own function got ``add_special_tokens=None``, which a tokenizer does not take and which is not False."""
    assert report["after"][case] == report["before"][case] == report["reverted"][case]
    assert answers(report["after"][case]) == ENDED_BY_THE_TEMPLATE


def test_a_template_that_writes_no_end_keeps_the_trainers(report):
    """As a user may have it, who knows that the trainer adds one."""
    for state in ("before", "after"):
        assert answers(report[state]["chat, no end"]) == ENDED_BY_THE_TEMPLATE


def test_its_condition_is_decided_once_for_each_data_set(report):
    """It holds for the two of conversations that are read here, and not for plain text.

    Nothing is said of answers that are cut, of rows of another process, of a subclass, or of a template without an end.
    """
    reached = report["reached"]
    assert (reached["calls"], reached["asked"], reached["held"]) == (9, 3, 2)


def test_a_rehearsal_finds_it(run_ranks):
    worker = "tests.patches.transformers.rehearsal_catalogue_ranks"
    (found,) = run_ranks(worker, "a chat", levels=beside("trl-0.27", "trl_dpo"), ranks=1)
    released, repaired = (found["a chat"][patches]["trained tokens"] for patches in ("off", "on"))
    assert (released["verdict"], repaired["verdict"]) == ("deviates", "holds")
    assert "4 of 4 rows end with two end tokens" in released["text"]
