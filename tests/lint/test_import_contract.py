"""The directions of imports that ``.importlinter`` states, and that a wrong import does not pass it.

Looked at as the package is installed, with ``patches`` in it: a checkout has no ``rlhf_patches.patches`` to import.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A copy of the package as a wheel has it."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "rlhf_patches", folder / "rlhf_patches", ignore=ignored)
    shutil.copytree(ROOT / "patches", folder / "rlhf_patches" / "patches", ignore=ignored)
    return folder


def lint(folder):
    """import-linter's status, and all that it says."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--config", str(ROOT / ".importlinter")]
    environment = {**os.environ, "PYTHONPATH": str(folder), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_contracts_are_kept(installed):
    status, said = lint(installed)
    assert status == 0, said


WRONG = {
    "settings.py": "from . import ranks",
    "definitions/patch.py": "from ..guards import sources",
    "definitions/errors.py": "from . import listed",
    "guards/versions.py": "from ..runs import comparison",
    "guards/places.py": "def late():\n    from .known import find",
    "engine/engine.py": "def late():\n    from ..offline import evaluate",
    "offline/evaluate.py": "from ..engine import functions",
    "authoring/upstream.py": "from ..runs import comparison",
    "runs/report_file.py": "def late():\n    from .. import api",
    "autoload.py": "from . import ray",
    "site_hook.py": "from . import Patch",
    "api.py": "from . import testing",
    "testing/cases.py": "def late():\n    from ..patches import plugin",
    "new_module.py": "",
    "definitions/registry.py": "from ..patches import plugin",
    "patches/trl/__init__.py": "from ...definitions.patch import Patch",
    "patches/verl/__init__.py": "from rlhf_patches.engine import functions",
}
SAID = [
    "rlhf_patches.settings -> rlhf_patches.ranks",
    "rlhf_patches.definitions.patch -> rlhf_patches.guards.sources",
    "No cycles are allowed in rlhf_patches.definitions.",
    "rlhf_patches.guards.versions -> rlhf_patches.runs.comparison",
    "No cycles are allowed in rlhf_patches.guards.",
    "rlhf_patches.engine.engine -> rlhf_patches.offline.evaluate",
    "rlhf_patches.offline.evaluate -> rlhf_patches.engine.functions",
    "rlhf_patches.authoring.upstream -> rlhf_patches.runs.comparison",
    "rlhf_patches.runs.report_file -> rlhf_patches.api",
    "rlhf_patches.autoload -> rlhf_patches.ray",
    "rlhf_patches.site_hook -> rlhf_patches ",
    "rlhf_patches.api -> rlhf_patches.testing",
    "rlhf_patches.testing.cases -> rlhf_patches.patches.plugin",
    "rlhf_patches.new_module",
    "rlhf_patches.definitions.registry -> rlhf_patches.patches.plugin",
    "rlhf_patches.patches.trl -> rlhf_patches.definitions.patch",
    "rlhf_patches.patches.verl -> rlhf_patches.engine.functions",
]


def test_every_wrong_import_is_named(installed, tmp_path):
    wrong = tmp_path / "wrong"
    shutil.copytree(installed, wrong)
    for file, line in WRONG.items():
        with open(wrong / "rlhf_patches" / file, "a") as module:
            module.write(f"\n{line}\n")
    status, said = lint(wrong)
    assert status == 1
    assert [each for each in SAID if each not in said] == [], said
