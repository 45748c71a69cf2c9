"""The record of every release, held against the patches' guards. Offline."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
from pathlib import Path

import compatibility
import pytest
import record
import shipped
from packaging.specifiers import SpecifierSet

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


def test_every_function_that_is_not_recognized_was_reviewed():
    assert record.unreviewed(RECORDS, PATCHES, record.reviewed()) == []


def test_the_record_was_made_with_these_patches():
    assert record.outdated(RECORDS, PATCHES) == [], "run `make releases`"


def test_the_page_in_docs_is_the_record():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert page == compatibility.page(RECORDS, PATCHES), "run `make releases`"


def test_what_is_shipped_is_the_record():
    assert shipped.PATH.read_text(encoding="utf-8") == shipped.text(RECORDS, PATCHES), "run `make releases`"
    assert shipped.VERSIONS.read_text(encoding="utf-8") == shipped.versions(RECORDS, PATCHES), "run `make releases`"


def test_what_is_shipped_tells_the_first_release_without_the_bug():
    known = json.loads(shipped.text(RECORDS, PATCHES))
    assert known["trl-chunked-nll-zero3"]["fixed"] == "1.15.0"
    assert known["verl-no-sync-reentry"]["fixed"] is None
    assert known["swift-kto-sequence-parallel"]["fixed"] == "3.12.3"
    # megatron.training is in no wheel before 0.17.
    assert known["megatron-lm-no-sync-reentry"]["without"]


def test_every_explained_disagreement_still_exists():
    found: dict[str, set[str]] = {}
    for item in record.disagreements(RECORDS, PATCHES):
        found.setdefault(item.patch, set()).update((item.version, item.file))
    for patch, notes in record.reviewed().accepted.items():
        for noted in notes:
            assert fnmatch.filter(found.get(patch, ()), noted), (patch, noted)


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


EVERY_VARIANT = [(patch, number) for patch in PATCHES for number in range(len(patch.variants))]
every_variant = pytest.mark.parametrize(
    ("patch", "number"), EVERY_VARIANT, ids=[f"{patch.name}-{number + 1}" for patch, number in EVERY_VARIANT]
)


def with_range(patch, number, versions):
    """The patch with another range for one variant, which may then overlap: that is what is to be noticed."""
    return with_guard(patch, number, Guard(patch.distribution, versions))


def with_guard(patch, number, guard):
    made = dataclasses.replace(patch)
    variants = list(patch.variants)
    variants[number] = dataclasses.replace(patch.variants[number], guard=guard)
    object.__setattr__(made, "variants", tuple(variants))
    return made


def bounds(patch, number):
    """The first and the last version with the defect in this shape, from the record, without what a person accepted."""
    reviewed = record.reviewed()
    versions = sorted(
        entry.order
        for item in record.records_of(patch, RECORDS)
        for entry in item.entries
        if number in record.recognized(patch, entry) and not reviewed.has_accepted(patch.name, entry.version)
    )
    return versions[0], versions[-1]


@every_variant
def test_a_range_that_claims_less_is_noticed(patch, number):
    versions = patch.variants[number].guard.versions
    for bound in bounds(patch, number):
        assert unexplained([with_range(patch, number, f"{versions},!={bound}")])


@pytest.mark.parametrize(
    ("patch", "number"),
    [pytest.param(*one, id=f"{one[0].name}-{one[1] + 1}") for one in EVERY_VARIANT if one[0].kind != "watch"],
)
def test_a_range_that_claims_more_is_noticed(patch, number):
    """Not of a watch, which looks at whatever takes the same arguments."""
    first, last = bounds(patch, number)
    for wider in ("", f">={first}", f"<={last}", f">={first},<={last.major + 1}", f">=0.0.0a0,<={last}"):
        complaints = [with_range(patch, number, wider)]
        assert unexplained(complaints) or record.loose_bounds(RECORDS, complaints), wider


def test_a_range_of_what_is_beside_that_ends_too_early_is_noticed():
    """`test_every_bound_was_read` asks of each that it ends with the newest that was read, or before a mended one."""
    read = {item.distribution for item in RECORDS}
    ends = {
        (patch.name, beside.distribution, str(pin)): (patch, number)
        for patch, number in EVERY_VARIANT
        if (beside := patch.variants[number].guard.co_installed) and beside.distribution in read
        for pin in SpecifierSet(beside.versions)
        if pin.operator == "<="
    }
    assert len(ends) >= 10
    for (name, distribution, pin), (patch, number) in ends.items():
        guard = patch.variants[number].guard
        earlier = dataclasses.replace(guard.co_installed, versions=guard.co_installed.versions.replace(pin, "<=0.1"))
        complaints = record.loose_bounds(
            RECORDS, [with_guard(patch, number, dataclasses.replace(guard, co_installed=earlier))]
        )
        assert [text for text in complaints if text.startswith(f"{name}: <=0.1 of {distribution}")]


def test_the_ranges_of_two_variants_exchanged_are_noticed():
    for patch in PATCHES:
        for one, other in itertools.pairwise(patch.variants):
            variants = tuple(
                dataclasses.replace(variant, guard={one: other, other: one}.get(variant, variant).guard)
                for variant in patch.variants
            )
            assert unexplained([dataclasses.replace(patch, variants=variants)]), patch.name


def test_a_patch_without_a_record_and_one_whose_changes_are_others_are_noticed():
    patch = next(each for each in PATCHES if len(each.variants) == 1)
    (variant,) = patch.variants

    def with_variant(**fields):
        return dataclasses.replace(patch, variants=(dataclasses.replace(variant, **fields),))

    (complaint,) = record.outdated(RECORDS, [with_variant(guard=Guard("no-such-framework", ">=1,<=2"))])
    assert "there is no record of no-such-framework" in complaint
    change = dataclasses.replace(variant.changes[0], matches=2)
    assert record.outdated(RECORDS, [with_variant(changes=(change, *variant.changes[1:]))])


# ------------------------------------------------------------------------------------------- fingerprints

CHUNKED = next(patch for patch in PATCHES if patch.name == "trl-chunked-nll-zero3")


def with_texts(texts):
    (variant,) = CHUNKED.variants
    (change,) = variant.changes
    change = dataclasses.replace(change, fingerprints={**change.fingerprints, **texts})
    return dataclasses.replace(CHUNKED, variants=(dataclasses.replace(variant, changes=(change,)),))


def test_every_fingerprint_names_the_releases_that_have_it():
    assert record.mistaken_fingerprints(RECORDS, PATCHES) == []


@pytest.mark.parametrize(
    "text",
    [
        "1.4.0 to 1.5.0: no gather",
        "1.4.0 to 1.6.0",
        "1.4.0",
        "1.4.0 to 1.5.1, main",
        "TODO",
        "1.4.0 and 1.5.1",
        "main to 1.5.1",
    ],
)
def test_a_fingerprint_with_other_releases_is_noticed(text):
    (complaint,) = record.mistaken_fingerprints(RECORDS, [with_texts({"049d735a374630d9": text})])
    assert "in 1.4.0, 1.5.0, 1.5.1; the patch says" in complaint


def test_the_releases_of_a_fingerprint_can_be_said_in_several_ways():
    for text in ("1.4.0 to 1.5.1", "1.4.0, 1.5.0 to 1.5.1: a note, with a comma: and more"):
        assert record.mistaken_fingerprints(RECORDS, [with_texts({"049d735a374630d9": text})]) == []
    (complaint,) = record.mistaken_fingerprints(RECORDS, [with_texts({"0" * 16: "1.4.0"})])
    assert "0000000000000000 in no release" in complaint


def test_a_note_does_not_change_the_digest_and_a_fingerprint_does():
    assert record.digest(CHUNKED) == record.digest(with_texts({"049d735a374630d9": "other words"}))
    assert record.digest(CHUNKED) != record.digest(with_texts({"0" * 16: "other words"}))


def test_what_has_to_be_defined_beside_a_change_is_of_the_digest():
    variant = dataclasses.replace(CHUNKED.variants[0], unless_defined=(f"{CHUNKED.variants[0].modules[0]}:repaired",))
    assert record.digest(dataclasses.replace(CHUNKED, variants=(variant,))) != record.digest(CHUNKED)


def test_a_function_that_was_not_reviewed_and_a_note_about_nothing_are_noticed():
    notes = record.reviewed()
    without = dataclasses.replace(notes, harmless={})
    assert any("not reviewed: ms-swift" in line for line in record.unreviewed(RECORDS, PATCHES, without))
    name = PATCHES[0].name
    stale = {**notes.harmless, name: {**notes.harmless.get(name, {}), "0123456789abcdef": "not there"}}
    (complaint,) = record.unreviewed(RECORDS, PATCHES, dataclasses.replace(notes, harmless=stale))
    assert "about no release in the record" in complaint
