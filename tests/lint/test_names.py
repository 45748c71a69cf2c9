"""A module in patches/ is a definition, by its bug's name without the framework, or begins with an underscore."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from rlhf_patches.patches.catalogue import LISTED

PATCHES = Path(__file__).parents[2] / "patches"
OF_ALL = {"plugin", "catalogue"}  # the entry point, and what it lists


def by_module() -> dict[str, list[str]]:
    """The names of the entries that each module defines."""
    modules = defaultdict(list)
    for listed in LISTED:
        modules[listed.path.partition(":")[0].removeprefix("rlhf_patches.patches.")].append(listed.name)
    return modules


DEFINED = by_module()


@pytest.mark.parametrize(("module", "names"), DEFINED.items())
def test_a_definition_bears_its_bugs_name(module, names):
    """Of several entries: what their names have in common, at the beginning or at the end."""
    framework, _, own = module.rpartition(".")
    without = [name.removeprefix(f"{framework}_") for name in (name.replace("-", "_") for name in names)]
    if len(names) == 1:
        assert without == [own]
    else:
        assert all(name == own or name.startswith(f"{own}_") for name in without) or all(
            name.endswith(f"_{own}") for name in without
        )


def test_whatever_is_no_definition_begins_with_an_underscore():
    modules = {file: file.relative_to(PATCHES).with_suffix("").parts for file in PATCHES.rglob("*.py")}
    helpers = {
        ".".join(parts)
        for parts in modules.values()
        if parts[-1] != "__init__" and "proofs" not in parts and not any(part.startswith("_") for part in parts)
    }
    assert helpers - OF_ALL == {*DEFINED}
