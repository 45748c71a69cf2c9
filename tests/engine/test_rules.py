"""What holds a patch: the rules, the sentences of its texts that say what stays, and the tests named for them."""

from __future__ import annotations

import pytest

from rlhf_patches import Guard, Patch, Rewrite, Variant
from rlhf_patches.testing import rules

NAMED = dict.fromkeys(rules.RULES, "test_a")
TESTS = {"": {"test_a", "test_b"}, "test_other.py": {"test_c"}}


def patch(**texts):
    known = dict(name="toy-bug", summary="s", symptom="s", cause="c", repair="r", references=("r",), obsolete_when="r")
    variants = (Variant(Guard("toy", "<2"), (Rewrite("toy:f", "a", "b"),)),)
    return Patch(**{**known, **texts}, variants=variants)


CLAIMS = (
    "The loss is the same, bit for bit.",
    "On one rank nothing changes.",
    "Nothing else of the function changes.",
    "It changes nothing on one rank.",
    "There is no change on one rank.",
    "Runs without it do not change.",
    "`set_adapter` is not changed.",
    "Without it the function runs unchanged.",
    "Others find the logits untouched.",
    "Not touched: the first adapter.",
    "A plain text ends as before.",
    "The others are on, as released.",
    "All others are as they were.",
    "The results are what they were.",
    "A model without it is left alone.",
    "Views are left as they are.",
    "It leaves the logits as they are.",
    "A timeout that is off stays so.",
    "Where no group is empty, nothing is done.",
    "Tokens that have a score keep the very numbers.",
    "Checkpoints fit with and without the patch.",
    "Without ZeRO-3 the original function runs.",
    "The sum is exactly that of the ranks.",
)
PROMISES = (
    "A seed of the user's stays.",
    "It never writes to the model.",
    "The step always divides.",
    "Only the last stage divides.",
)
NO_CLAIMS = (
    "To go on as before, set `--loss_type sigmoid`.",
    "It leaves the context, whatever was before.",
    "A checkpoint is as good as what it was trained on.",
    "A response counts as often as it is long.",
    "Left alone: copies of this code.",
    "The gradients are those of the mean.",
)


@pytest.mark.parametrize("sentence", PROMISES)
def test_a_repair_that_promises_needs_a_test(sentence):
    assert list(rules.claims(patch(repair=f"It is repaired. {sentence}"))) == [sentence]
    assert list(rules.claims(patch(cause=f"Upstream divides. {sentence}"))) == []  # upstream's code may do that


@pytest.mark.parametrize("sentence", ["Repairs of your own may stay.", "Answers that never end hold others up once."])
def test_what_only_sounds_so_is_no_promise(sentence):
    assert list(rules.claims(patch(repair=sentence))) == []


def test_what_decides_by_a_name_needs_a_test(monkeypatch):
    deciding = patch()
    monkeypatch.setattr(rules.conduct, "inferences", lambda _: ["file.py:3: `x.__name__ == 'T'` goes by a name"])
    (said,) = rules.wrong_with(NAMED, [deciding], TESTS)
    assert said.startswith('it has no "known"')
    assert "file.py:3" in said
    assert rules.wrong_with({**NAMED, "known": "test_b"}, [deciding], TESTS) == []


@pytest.mark.parametrize("sentence", CLAIMS)
@pytest.mark.parametrize("field", ["summary", "symptom", "cause", "repair", "changes_numbers"])
def test_a_sentence_that_says_what_stays_needs_a_test(sentence, field):
    claiming = patch(**{field: sentence if field == "summary" else f"It is repaired. {sentence} And so on."})
    assert list(rules.claims(claiming)) == [sentence]
    (said,) = rules.wrong_with(NAMED, [claiming], TESTS)
    assert said == f"toy-bug states: {sentence} (expected a key of words in it, and the test that holds it)"
    assert rules.wrong_with({**NAMED, sentence[-15:]: "test_b"}, [claiming], TESTS) == []


@pytest.mark.parametrize("sentence", NO_CLAIMS)
def test_other_sentences_do_not(sentence):
    assert rules.wrong_with(NAMED, [patch(repair=sentence)], TESTS) == []


def test_each_claim_needs_its_own_key_across_lines_lists_and_tables():
    text = """\
It is repaired, and on one
rank nothing changes. The loss is
as before:

- evaluation is left
  alone
- training is not

| case | result |
| --- | --- |
| one rank | unchanged |"""
    claiming = patch(repair=text)
    assert list(rules.claims(claiming)) == [
        "It is repaired, and on one rank nothing changes.",
        "The loss is as before:",
        "- evaluation is left alone",
        "| one rank | unchanged |",
    ]
    held = {**NAMED, "nothing changes": "test_b", "one rank | unchanged": "test_a", "left alone": "test_a"}
    assert [said.partition(" (")[0] for said in rules.wrong_with(held, [claiming], TESTS)] == [
        "toy-bug states: The loss is as before:"
    ]


@pytest.mark.parametrize(
    "value", ["test_b", ("test_a", "test_b"), ["test_other.py::test_c"], "because it is one rewrite"]
)
def test_tests_that_are_there_and_reasons_are_right(value):
    assert rules.wrong_with({**NAMED, "no side effects": value}, [patch()], TESTS) == []


WRONG = {
    "no test of that name": ("test_c", '"no side effects": there is no test test_c in this module'),
    "another file has none": ("test_other.py::test_a", '"no side effects": there is no test test_a in test_other.py'),
    "no such file": ("test_nothing.py::test_a", '"no side effects": there is no test_nothing.py in its folder'),
    "none": ((), '"no side effects" names no test, and no reason'),
    "nothing": ("", "\"no side effects\": '' is neither the name of a test nor a reason"),
    "a mark": ("TODO: a test", '"no side effects": not written yet: TODO: a test'),
    "a number": ((1,), '"no side effects": 1 is neither the name of a test nor a reason'),
    "a sentence": ("it is fine", '"no side effects": there is no test it is fine in this module'),
    "a reason that is none": ("because it is", "\"no side effects\": 'because it is' gives no reason"),
}


@pytest.mark.parametrize(("value", "said"), WRONG.values(), ids=WRONG)
def test_what_names_no_test_is_said(value, said):
    (found,) = rules.wrong_with({**NAMED, "no side effects": value}, [patch()], TESTS)
    assert found.startswith(said)


def test_each_rule_is_asked_for_and_words_that_are_in_no_text_are_stale():
    found = rules.wrong_with({"hands of": "test_a"}, [patch()], TESTS)
    assert [said.partition(":")[0] for said in found] == [
        *(f'it has no "{rule}"' for rule in rules.RULES),
        '"hands of" is in no text of the patch',
    ]


def test_one_module_may_say_it_for_several_patches():
    one, other = patch(repair="It is as before."), patch(name="toy-other", repair="It is unchanged.")
    assert rules.wrong_with({**NAMED, "as before": "test_a", "unchanged": "test_b"}, [one, other], TESTS) == []
    (said,) = rules.wrong_with({**NAMED, "as before": "test_a"}, [one, other], TESTS)
    assert said.startswith("toy-other states: It is unchanged.")


def test_tests_are_read_from_files_and_nothing_is_imported(tmp_path):
    (tmp_path / "test_high.py").write_text("def test_d(): pass\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_other.py").write_text("def test_c(): pass\ndef helper(): pass\n")
    beside = tmp_path / "deep" / "test_this.py"
    beside.write_text("import no_such_module\nclass TestA:\n    async def test_a(self): pass\n")
    held = {
        "minimal scope": ("test_a", "test_other.py::test_c"),
        "no side effects": "test_high.py::test_d",
        "x": "no.py::test",
    }
    assert rules.tests_by_file(held, beside) == {
        "": {"test_a"},
        "test_other.py": {"test_c"},
        "test_high.py": {"test_d"},
    }
