"""Real releases, fetched as ``rlhf-patches check NAME==VERSION`` fetches them, against the record.

Those on either side of each change of state: where a wrong guard would do harm. `make test` reads the newest of each.
"""

from __future__ import annotations

import os
from pathlib import Path

import compatibility
import pytest
import record
import texts
from packaging.version import Version

from rlhf_patches.definitions.registry import Registered
from rlhf_patches.guards import memory
from rlhf_patches.offline import archive, download, evaluate, facts

CACHE = Path(os.environ.get("RLHF_PATCHES_TEST_CACHE", Path(__file__).parents[2] / ".cache" / "rlhf-patches"))
PATCHES = record.built_in()


def sample():
    """(record, version) of the first and last release of each stretch of equal state, of functions that exist."""
    found = {}
    for item in record.load_all():
        if item.in_git or item.name in record.reviewed().parts:  # of these whole wheels are too much
            continue
        for patch in record.patches_of(item.distribution, PATCHES):
            if item.has_module(patch):
                for members, _ in compatibility.stretches(item, patch):
                    for entry in (members[0], members[-1]):
                        # DeepSpeed has sdists and wheels for Windows; of sdists one is read in test_check.py.
                        fetched = entry.file.endswith(".whl") and "-win" not in entry.file
                        if fetched and record.code(patch, entry).state != facts.NO_MODULE:
                            found[item.name, entry.version] = entry
    return found


SAMPLE = sample()
RECORD_OF = {item.name: item for item in record.load_all() if not item.in_git}
NEWEST = {name: version for name, version in SAMPLE if version == max((v for n, v in SAMPLE if n == name), key=Version)}


def test_the_sample_has_both_kinds():
    states = {code.state for entry in SAMPLE.values() for codes in entry.patches.values() for code in codes}
    assert {facts.DEFECT, facts.NO_FUNCTION} <= states
    assert len(SAMPLE) >= 8


@pytest.mark.parametrize(
    ("name", "version"),
    [
        pytest.param(name, version, marks=() if NEWEST[name] == version else pytest.mark.exhaustive)
        for name, version in SAMPLE
    ],
    ids=lambda text: text,
)
def test_a_published_wheel_is_as_the_record_says(name, version, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "CACHE", tmp_path)
    release = archive.open_release(str(download.fetch(f"{name}=={version}", CACHE)))
    entry = SAMPLE[name, version]
    own = record.patches_of(name, PATCHES)
    with memory.parsed_once(kept=40):
        hold(release, name, entry, own)


def hold(release, name, entry, own):
    assert {patch.name: facts.examine(release, patch) for patch in own} == entry.patches
    digests, found = texts.of_release(release, own)
    assert digests == entry.texts
    for package, one in found.items() if entry in texts.kept(RECORD_OF[name]) else ():
        shipped = texts.load(package)
        assert one.texts.keys() <= shipped.texts.keys()
        for key, function in one.functions.items():
            changes = function.pop("changes")
            assert function.items() <= shipped.functions[key].items()
            assert changes.items() <= shipped.functions[key]["changes"].items()
    # And what a user is told follows from it.
    report = evaluate.check(release, [Registered(patch, "tests") for patch in own], by_name=True)
    for patch, row in zip(own, report, strict=True):
        assert row.status.value == compatibility.decision(patch, entry)
        assert row.version == entry.version
