"""What ``rlhf-patches new`` writes, installed by pip, and run through list, doctor and its own tests."""

from __future__ import annotations

import json
import re

import pytest

from rlhf_patches.definitions.bug import HARMS
from rlhf_patches.testing import rules
from tests.harness.nested_pytest import alone

NAME = "toy-masked-mean-again"
PATCH = f"{NAME}/rlhf_patches_toy_masked_mean_again/patch.py"
TEST = f"{NAME}/tests/test_patch.py"
TARGET = ("--target", "toy_framework.losses:masked_mean")


@pytest.fixture
def environment(with_toy, tmp_path):
    return with_toy.copy(tmp_path / "environment")


def new(environment, folder, *arguments):
    """Write the plugin and install it, editable."""
    done = environment.run(environment.command, "new", NAME, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    environment.pip_install("-e", folder / NAME)


def row(environment):
    """The patch in ``doctor``."""
    done = environment.run(environment.command, "doctor", "--json")
    (found,) = [each for each in json.loads(done.stdout) if each["name"] == NAME]
    assert found["plugin"] == f"rlhf-patches-{NAME}"
    return found


def own_tests(environment, folder):
    """The outcome of each of its tests, and all that pytest said."""
    done = environment.run(environment.python, "-m", "pytest", "-v", *alone(folder), cwd=folder / NAME)
    lines = [
        line.partition("::")[2].split()
        for line in done.stdout.splitlines()
        if line.startswith("tests/") and "::" in line
    ]
    return {words[0].rpartition("::")[2]: words[1] for words in lines}, done.stdout, done.returncode


def fill_in(file, *changes):
    text = file.read_text()
    for old, replacement in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, replacement)
    file.write_text(text)


@pytest.mark.one_python
def test_from_a_new_plugin_to_one_whose_tests_pass(environment, tmp_path):
    new(environment, tmp_path, *TARGET, "--pattern", "$A / len($B)", "--replacement", "$A / sum(mask)")
    listed = environment.run(environment.command, "list")
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith(f"{NAME} ")]
    assert f"(plugin rlhf-patches-{NAME})" in line
    found = row(environment)
    assert (found["status"], found["guard"], found["version"]) == ("applies", "==1.4", "1.4")

    outcomes, said, status = own_tests(environment, tmp_path)
    assert status == 1
    left = {name for name, outcome in outcomes.items() if outcome == "FAILED"}
    assert left == {
        "test_its_fields_are_complete",
        "test_what_holds_it_is_named",
        "test_wrong_without_the_patch_and_right_with_it",
        "test_nothing_is_left_to_write",
    }
    assert outcomes["test_it_applies_to_the_text[installed]"] == "PASSED"
    assert outcomes["test_it_is_applied_reverted_and_disabled_in_this_process"] == "PASSED"
    assert 'patch.py:13: symptom="TODO: what a user sees, the error message included",' in said
    assert "result() is not written yet" in said
    for rule in rules.RULES:
        assert f'"{rule}": not written yet: TODO: a test' in said

    fill_in(
        tmp_path / PATCH,
        (f'"",  # TODO: one of {", ".join(HARMS)}', '"wrong metric",'),
        *(
            (f"TODO: {text}", "It is written.")
            for text in (
                *("what the patch repairs, in one line", "what is wrong, in one line", "why upstream's code does that"),
                "the configuration in which the bug occurs, in one line",
            )
        ),
        ("TODO: what a user sees, the error message included", "The loss shrinks with padding."),
        ("TODO: what the patch changes, and what it does not change", "It divides by the sum. All else is unchanged."),
        ("TODO: the address of upstream's issue or pull request", "https://example.invalid/1"),
        ("TODO: when the patch can be removed", "with toy-framework 2"),
        ('(),  # TODO: of a bug that raises: (Signature("KeyError", "its message"),), for `diagnose`', "(),"),
    )
    _, said, status = own_tests(environment, tmp_path)
    assert status == 1
    assert " patch.py:" not in said

    text = (tmp_path / TEST).read_text()
    body = text[text.index("        # TODO: call") : text.index("    wrong = ")]
    fill_in(
        tmp_path / TEST,
        (body, "        return masked_mean([1.0, 3.0, 0.0, 0.0], [1, 1, 0, 0])\n\n"),
        ("\"TODO: what it returns without the patch, or what it raises, as 'KeyError: key'\"", "1.0"),
        ('"TODO: what is right, from a computation that does not use the patch"', "2.0"),
    )
    (tmp_path / TEST).write_text(
        re.sub(
            r'"TODO: a test [^"]*"', '"test_wrong_without_the_patch_and_right_with_it"', (tmp_path / TEST).read_text()
        )
    )
    outcomes, said, status = own_tests(environment, tmp_path)
    assert {name for name, outcome in outcomes.items() if outcome == "FAILED"} == {"test_what_holds_it_is_named"}
    assert f"{NAME} states: All else is unchanged. (expected a key of words in it" in said
    fill_in(
        tmp_path / TEST,
        ('"minimal scope": ', '"unchanged": "because the rest is the release\'s own", "minimal scope": '),
    )
    outcomes, said, status = own_tests(environment, tmp_path)
    assert status == 0, said
    assert outcomes["test_wrong_without_the_patch_and_right_with_it"] == "PASSED"

    with pytest.raises(ZeroDivisionError) as division:  # which Python says in other words in 3.14
        _ = 0.0 / 0
    fill_in(  # with nothing in the mask, what the patch does is to raise
        tmp_path / TEST,
        ("[1.0, 3.0, 0.0, 0.0], [1, 1, 0, 0]", "[1.0, 3.0], [0, 0]"),
        ("wrong = 1.0", "wrong = 0.0"),
        ("right = 2.0", f"right = 'ZeroDivisionError: {division.value}'"),
    )
    outcomes, said, status = own_tests(environment, tmp_path)
    assert status == 0, said
    fill_in(tmp_path / TEST, ("right = 'ZeroDivisionError", "right = 'ValueError"))
    outcomes, said, status = own_tests(environment, tmp_path)
    assert outcomes["test_wrong_without_the_patch_and_right_with_it"] == "FAILED"
    assert "in masked_mean" in said  # where it comes from


@pytest.mark.exhaustive
def test_one_that_is_not_finished_is_refused_and_its_tests_fail(environment, tmp_path):
    new(environment, tmp_path, *TARGET)
    found = row(environment)
    assert found["status"] == "refused"
    assert "TODO: $PATTERN" in found["reason"]
    outcomes, _, status = own_tests(environment, tmp_path)
    assert status == 1
    assert outcomes["test_it_applies_to_the_text[installed]"] == "FAILED"
