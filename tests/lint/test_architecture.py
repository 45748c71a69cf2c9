"""docs/architecture.md names every module of the package, in its folder, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tree_of_modules_is_that_of_the_package():
    page = (ROOT / "docs" / "architecture.md").read_text()
    tree = page.partition("## Modules\n")[2].partition("    rlhf_patches/\n")[2].partition("\n\n")[0]
    named, folder = set(), ""
    for line in tree.splitlines():
        indentation, name = re.match(r"( +)(\w+/?)  ", line).groups()
        if name.endswith("/"):
            folder = name
        else:
            named.add((folder if len(indentation) > 6 else "") + name)
    package = ROOT / "rlhf_patches"
    modules = {str(file.relative_to(package).with_suffix("")) for file in package.glob("**/*.py")}
    assert named == {name for name in modules if not name.endswith(("/__init__", "__main__", "_version"))}
