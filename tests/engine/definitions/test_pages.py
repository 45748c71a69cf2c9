"""What a page and a list say first: how bad a bug is, what is wrong, and when."""

from __future__ import annotations

import dataclasses

import pytest

from rlhf_patches.definitions import pages
from rlhf_patches.definitions.patch import HARMS, Advice, Patch, Watch
from rlhf_patches.patches import plugin

BUILT_IN = {patch.name: patch for patch in plugin.rlhf_patches()}


@pytest.mark.parametrize("name", [name for name, patch in BUILT_IN.items() if not isinstance(patch, Watch)])
def test_every_patch_says_what_is_wrong_how_bad_that_is_and_when(name):
    patch = BUILT_IN[name]
    assert patch.harm in HARMS
    assert patch.bug
    assert patch.when
    assert patch.bug != patch.summary or isinstance(patch, Advice)


def test_a_page_begins_with_them():
    patch = BUILT_IN["trl-dpo-second-eos"]
    head = " ".join(pages.page(patch).partition("## ")[0].split())
    assert head == (
        f"# trl-dpo-second-eos {patch.summary}. - **Harm:** wrong data. - **Bug:** every chosen and rejected answer "
        "ends twice. - **When:** DPOTrainer on conversations."
    )


def test_an_advice_says_once_what_is_wrong():
    advice = next(patch for patch in BUILT_IN.values() if isinstance(patch, Advice))
    assert pages.page(advice).count(advice.bug) == 1
    assert pages.bug(advice) == f"{advice.bug}. When: {advice.when} (advice: not repaired)"


def test_what_a_plugins_patch_does_not_say_is_left_out():
    patch = BUILT_IN["trl-metrics-deadlock"]
    silent = dataclasses.replace(patch, harm="", bug="", when="")
    assert isinstance(silent, Patch)
    assert "**" not in pages.page(silent).partition("## ")[0]
    assert pages.bug(silent) == silent.summary
    assert pages.bug(dataclasses.replace(patch, when="")) == patch.bug
    bugs = [each for each in BUILT_IN.values() if not isinstance(each, Watch)]
    assert max([silent, *bugs], key=pages.by_harm) is silent


def test_the_worst_comes_first_in_the_index():
    training, rollouts, *_ = pages.index(BUILT_IN.values()).split("\n## ")
    for section, of_rollouts, kinds in ((training, False, 5), (rollouts, True, 3)):
        found = [line.split("|")[3].strip() for line in section.splitlines() if line.startswith("| [")]
        patches = [each for each in BUILT_IN.values() if isinstance(each, Patch) and each.of_rollouts == of_rollouts]
        assert len(found) == len(patches)
        assert found == sorted(found, key=HARMS.index)
        assert len(set(found)) > kinds
