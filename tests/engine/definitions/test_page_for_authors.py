"""docs/writing-a-patch.md: its examples are valid definitions, and its table names the tests of the contract."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import rlhf_patches
from rlhf_patches import Advice, Patch, Watch, Wrap
from rlhf_patches.testing import PatchContract

PAGE = (Path(__file__).parents[3] / "docs" / "writing-a-patch.md").read_text()


def test_its_examples_are_valid(monkeypatch):
    found = {name: getattr(rlhf_patches, name) for name in ("Advice", "Guard", "Shape", "Variant", "Replace", "Wrap")}
    patches = types.ModuleType("your_package.patches")
    monkeypatch.setitem(sys.modules, "your_package", types.ModuleType("your_package"))
    monkeypatch.setitem(sys.modules, "your_package.patches", patches)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for block in blocks:
        exec(block, found)
        vars(patches).update(found)
    kinds = {type(found[name]) for name in ("PATCH", "ADVICE", "WRAP", "BY_SIGNATURE", "WATCH")}
    assert kinds == {Patch, Advice, Watch, Wrap}
    assert found["TestContract"].patch is found["PATCH"]
    assert "test_padding_does_not_count" in found


def test_its_table_names_the_tests_of_the_contract():
    named = re.findall(r"^\| `(test_\w+)` \|", PAGE, re.MULTILINE)
    assert named == [name for name in vars(PatchContract) if name.startswith("test_")]
