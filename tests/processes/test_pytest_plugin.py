"""What pytest loads by itself wherever the package is installed: next to nothing, and never a patch."""

from __future__ import annotations

import json

from tests.harness.nested_pytest import alone

MINE = """
import json, pathlib, sys

def test():
    found = [name for name in sys.modules if name.partition(".")[0] == "rlhf_patches"]
    pathlib.Path("found.json").write_text(json.dumps(sorted(found)))
"""


def run(installed, folder, text, **settings):
    (folder / "test_it.py").write_text(text)
    pytest = (installed.python, "-W", "error", "-m", "pytest", "-q", *alone(folder))
    done = installed.run(*pytest, cwd=folder, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed in" in done.stdout


def test_no_engine_is_imported_until_the_fixture_is_used(installed, tmp_path):
    run(installed, tmp_path, MINE)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == ["rlhf_patches", "rlhf_patches.import_system", "rlhf_patches.pytest_plugin"]


def test_pytest_says_nothing_of_a_package_that_the_site_hook_has_imported(installed, tmp_path):
    run(installed, tmp_path, "def test(apply_patch):\n    pass\n", RLHF_PATCHES_AUTOLOAD="1")
