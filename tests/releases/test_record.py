"""The record of every release, held against the patches' guards. Offline."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import compatibility
import pytest
import record

from rlhf_patches import Guard

PATCHES = record.built_in()
RECORDS = record.load_all()
ROOT = Path(__file__).parents[2]


def unexplained(patches):
    notes = record.reviewed()
    return [str(item) for item in record.disagreements(RECORDS, patches) if not notes.accepts(item)]


def test_every_range_claims_exactly_the_releases_that_have_the_defect():
    assert unexplained(PATCHES) == []


def test_every_bound_was_read():
    assert record.loose_bounds(RECORDS, PATCHES) == []


def test_somebody_has_read_every_function_that_is_not_recognised():
    assert record.unreviewed(RECORDS, PATCHES, record.reviewed()) == []


def test_the_record_was_made_with_these_patches():
    assert record.outdated(RECORDS, PATCHES) == [], "run `make releases`"


def test_the_page_in_docs_is_the_record():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert page == compatibility.page(RECORDS, PATCHES), "run `make releases`"


def test_every_explained_disagreement_still_exists():
    found = {(item.patch, item.version) for item in record.disagreements(RECORDS, PATCHES)}
    noted = {(patch, version) for patch, notes in record.reviewed().accepted.items() for version in notes}
    assert noted <= found


def test_records_read_back_as_written(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "HERE", tmp_path)
    for item in RECORDS:
        record.save(item)
        assert record.load(item.path) == item


def test_releases_are_published_files_or_commits():
    for item in RECORDS:
        assert item.entries
        lengths = {len(entry.sha256) for entry in item.entries}
        assert lengths == {40 if item.in_git else 64}
        assert len({entry.file for entry in item.entries}) == len(item.entries)


# ------------------------------------------------------------------------------ the checks above can fail


def with_range(patch, versions):
    return dataclasses.replace(patch, guard=Guard(patch.guard.distribution, versions))


def bounds(patch):
    """The first and the last version with the defect, from the record."""
    entries = [
        entry
        for item in RECORDS
        if record.patches_of(item.distribution, [patch])
        for entry in item.entries
        if entry.patches[patch.name].state == record.DEFECT
    ]
    versions = sorted({entry.order for entry in entries})
    return versions[0], versions[-1]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_range_that_claims_less_is_noticed(patch):
    first, last = bounds(patch)
    assert unexplained([with_range(patch, f"{patch.guard.versions},!={first}")])
    assert unexplained([with_range(patch, f"{patch.guard.versions},!={last}")])


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_range_that_claims_more_is_noticed(patch):
    first, last = bounds(patch)
    for wider in ("", f">={first}", f"<={last}", f">={first},<={last.major + 1}", f">=0.0.0a0,<={last}"):
        complaints = [with_range(patch, wider)]
        assert unexplained(complaints) or record.loose_bounds(RECORDS, complaints), wider


def test_a_patch_without_a_record_and_one_whose_changes_are_others_are_noticed():
    patch = PATCHES[0]
    stranger = dataclasses.replace(patch, guard=Guard("no-such-framework", ">=1,<=2"))
    (complaint,) = record.outdated(RECORDS, [stranger])
    assert "there is no record of no-such-framework" in complaint
    change = dataclasses.replace(patch.changes[0], matches=2)
    assert record.outdated(RECORDS, [dataclasses.replace(patch, changes=(change, *patch.changes[1:]))])


def test_a_function_that_nobody_has_read_and_a_note_about_nothing_are_noticed():
    notes = record.reviewed()
    without = dataclasses.replace(notes, harmless={})
    assert any("nobody has read ms-swift" in line for line in record.unreviewed(RECORDS, PATCHES, without))
    stale = {**notes.harmless, PATCHES[0].name: {"0123456789abcdef": "not there"}}
    (complaint,) = record.unreviewed(RECORDS, PATCHES, dataclasses.replace(notes, harmless=stale))
    assert "about no release in the record" in complaint
