"""What tools/derive.py writes is what follows from the patches, and what a wheel holds is what is in the tree.

The pages are compared in test_cli.py, the hook's files in test_site_hook.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rlhf_patches import site_hook
from rlhf_patches.patches import plugin

ROOT = Path(__file__).parents[3]


@pytest.fixture
def derive(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import derive

    yield derive
    del sys.modules["derive"]


def test_the_catalogue_has_every_patch(derive):
    found = derive.paths(ROOT / "patches")
    assert (ROOT / "patches" / "catalogue.py").read_text() == derive.catalogue(found), "run `make docs`"
    # A module that makes a patch and gives it another name than PATCH would be missing; so would an advice.
    makers = [
        path
        for path in (ROOT / "patches").glob("*/*.py")
        if re.search(r"= _?([Pp]atch|Advice|Watch)\(", path.read_text())
    ]
    assert {path.relative_to(ROOT / "patches").with_suffix("") for path in makers} == {
        Path(*path.partition(":")[0].split(".")) for path in found
    }
    assert len({patch.name for patch in plugin.rlhf_patches()}) == len(found)


def test_a_patch_is_found_by_its_name_and_nothing_is_imported(derive, tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "bug.py").write_text("raise SystemExit\nPATCH = ADVICE_OLD = f()\nPATCHES = ()\nx.PATCH = 1\n")
    (tmp_path / "some" / "helper.py").write_text("import torch\ndef f():\n    PATCH = 1\n")
    assert derive.paths(tmp_path) == ["some.bug:PATCH", "some.bug:ADVICE_OLD"]


def test_the_site_hook_waits_for_what_is_patched(derive):
    assert derive.watched(plugin.rlhf_patches()) == site_hook.WATCHED, "run `make docs`"
    text = (ROOT / "rlhf_patches" / "site_hook.py").read_text()
    assert derive.with_watched(text, site_hook.WATCHED) == text
    assert 'WATCHED = ("a", "b")' in derive.with_watched(text, ("a", "b"))


def test_a_wheel_has_every_module_and_no_other(installed):
    def modules(folder):
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}

    package = installed.site / "rlhf_patches"
    assert modules(package / "patches") == modules(ROOT / "patches")
    assert {name for name in modules(package) if not name.startswith("patches/")} == modules(ROOT / "rlhf_patches")
    assert (package / "py.typed").exists() == (ROOT / "rlhf_patches" / "py.typed").exists()
