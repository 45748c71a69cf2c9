"""What the package ships of released texts: all that the record names, and nothing else, as it was found."""

from __future__ import annotations

import pytest
import record
import texts

from rlhf_patches.definitions.changes import Rewrite, Shape
from rlhf_patches.guards import known
from rlhf_patches.guards.places import Source

PATCHES = record.built_in()
RECORDS = record.load_all()
SHIPPED = texts.of_record(RECORDS, PATCHES)


def test_there_is_a_file_for_each_package_that_is_patched():
    modules = {module for patch in PATCHES for module in patch.modules}
    assert set(texts.packages()) == {module.partition(".")[0] for module in modules} == set(SHIPPED)


@pytest.mark.parametrize("package", texts.packages())
def test_a_file_is_what_the_record_needs(package):
    """Every byte: its own digest too, without which it would count as damaged."""
    assert (texts.FOLDER / f"{package}.json").read_bytes() == SHIPPED[package].to_bytes()


def test_every_change_is_known_in_every_released_text():
    """Else processes would search the text of a release that was read."""
    facts = {package: texts.load(package) for package in texts.packages()}
    places = {
        (module, entry.texts[module]): f"{item.name} {entry.label}"
        for item in RECORDS
        for entry in texts.kept(item)
        for module in entry.texts
    }
    assert len(places) > 900
    unknown = []
    for patch in PATCHES:
        for variant in patch.variants:
            for change in filter(texts.is_kept, variant.changes):
                module, _, qualname = change.target.partition(":")
                for (name, digest), release in places.items():
                    if name != module:
                        continue
                    one = facts[module.partition(".")[0]]
                    place = one.texts[digest]["functions"].get(qualname)
                    changes = one.functions[place[1]]["changes"] if isinstance(place, list) else {}
                    is_searched = isinstance(change, (Rewrite, Shape)) and isinstance(place, list)
                    if place is None or (is_searched and changes.get(known.key_of(change)) is None):
                        unknown.append((patch.name, change.target, release))
    assert unknown == []


def test_another_text_is_not_known():
    source = Source("trl.trainer.grpo_trainer", "grpo_trainer.py", "class GRPOTrainer: ...\n")
    assert known.look_up(source) == source
