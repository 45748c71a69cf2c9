"""What a page and a list say first: how bad a bug is, what is wrong, and when."""

from __future__ import annotations

import dataclasses
import re

import pytest

from rlhf_patches.definitions import pages
from rlhf_patches.definitions.bug import HARMS
from rlhf_patches.definitions.patch import Advice, Patch, Watch
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
        "ends with two end-of-sequence tokens. - **When:** DPOTrainer on conversations."
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


def test_the_index_has_each_bug_under_its_harm_by_framework():
    _, *sections = pages.index(BUILT_IN.values()).split("\n## ")
    found = {section.partition("\n")[0]: re.findall(r"^\| \[([^]]+)\]", section, re.M) for section in sections}
    assert [*found] == [*(harm.capitalize() for harm in HARMS), "Watches"]
    for heading, names in found.items():
        harm = "" if heading == "Watches" else heading.lower()
        assert {*names} == {each.name for each in BUILT_IN.values() if each.harm == harm}
        assert names == sorted(names, key=lambda name: (BUILT_IN[name].distribution, name))
    silent = dataclasses.replace(BUILT_IN["trl-metrics-deadlock"], harm="")
    assert "## Harm not stated\n" in pages.index([silent])
