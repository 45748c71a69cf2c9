"""What belongs to every patch, whatever release is at hand: its texts, its code, its page and its record."""

from __future__ import annotations

import functools
import json
from collections import defaultdict

from rlhf_patches.definitions import pages
from rlhf_patches.testing import checks
from tests.patches.test_contract import ROOT, each_patch


@functools.cache
def recorded() -> dict[str, list[list[str]]]:
    """By patch, of each release: the state of each variant."""
    found = defaultdict(list)
    for path in (ROOT / "release_record" / "record").rglob("*.json"):
        for release in json.loads(path.read_text())["releases"]:
            for name, states in release["patches"].items():
                found[name].append([state["state"] for state in states])
    return found


@each_patch
def test_its_fields_are_complete(patch):
    checks.fields_are_complete(patch)


@each_patch
def test_what_it_waits_for_has_a_bound(patch):
    checks.waits_have_bounds(patch)


@each_patch
def test_it_has_no_side_effects(patch):
    checks.side_effects(patch)


@each_patch
def test_it_knows_and_does_not_infer(patch):
    checks.it_knows(patch)


@each_patch
def test_its_page_its_record_and_its_row_exist(patch):
    page = (ROOT / "docs" / "patches" / f"{patch.name}.md").read_text()
    assert pages._sentence(patch.summary) in page
    for number, variant in enumerate(patch.variants):
        known = [states[number] for states in recorded()[patch.name]]
        assert "defect" in known, f"no release is recorded for {variant.guard}"
    row = f"[{patch.name}](patches/{patch.name}.md)"
    assert row in (ROOT / "docs" / "compatibility.md").read_text()
