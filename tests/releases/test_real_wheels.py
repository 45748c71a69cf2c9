"""A few real releases, fetched as ``rlhf-patches check NAME==VERSION`` fetches them, against the record.

Those on either side of each change of state: where a wrong guard would do harm.
"""

from __future__ import annotations

import os
from pathlib import Path

import compatibility
import pytest
import record

from rlhf_patches import download, inspection, releases
from rlhf_patches.plugins import Registered

CACHE = Path(os.environ.get("RLHF_PATCHES_TEST_CACHE", Path(__file__).parents[2] / ".cache" / "rlhf-patches"))
PATCHES = record.built_in()


def sample():
    """(record, version) of the first and last release of each stretch of equal state, of functions that exist."""
    found = {}
    for item in record.load_all():
        if item.in_git:
            continue
        for patch in record.patches_of(item.distribution, PATCHES):
            if item.has_module(patch):
                for members, _ in compatibility.stretches(item, patch):
                    for entry in (members[0], members[-1]):
                        if entry.patches[patch.name].state != record.NO_MODULE:
                            found[item.name, entry.version] = entry
    return found


SAMPLE = sample()


def test_the_sample_has_both_kinds():
    states = {code.state for entry in SAMPLE.values() for code in entry.patches.values()}
    assert {record.DEFECT, record.NO_FUNCTION} <= states
    assert len(SAMPLE) >= 8


@pytest.mark.parametrize(("name", "version"), SAMPLE, ids=lambda text: text)
def test_a_published_wheel_is_as_the_record_says(name, version):
    release = releases.read(str(download.fetch(f"{name}=={version}", CACHE)))
    entry = SAMPLE[name, version]
    own = record.patches_of(name, PATCHES)
    assert {patch.name: record.examine(release, patch) for patch in own} == entry.patches
    # And what a user is told follows from it.
    report = inspection.check(release, [Registered(patch, "tests") for patch in own])
    for patch, row in zip(own, report, strict=True):
        inside = record.claims(patch, entry)
        assert row.status.value == compatibility.decision(inside, entry.patches[patch.name])
        assert row.version == version
