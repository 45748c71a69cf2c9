"""The Pythons of the engine's tests: which there are here, and which could be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tools import pythons

# The frameworks' own releases run on 3.11; torch's CPU build at hand is for 3.11 too.
FRAMEWORK_PYTHON = "3.11"
ENGINE_PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14", "3.15"]
# What tools/pythons.py takes from Debian's testing and unstable suites, where it can and none is found otherwise.
OF_DEBIAN = ["3.14", "3.15"]

# pyenv's shims answer for interpreters that its configuration does not name; its folders of interpreters do not.
_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
_IN_PYENV = [str(path) for version in ENGINE_PYTHONS for path in sorted(_PYENV.glob(f"versions/{version}.*/bin"))]
os.environ["PATH"] = os.pathsep.join([*_IN_PYENV, os.environ["PATH"], str(pythons.FOLDER / "bin")])


def is_here(version: str) -> bool:
    """Whether an interpreter is found, which may be after it was not."""
    return shutil.which(f"python{version}") is not None


# Those that are to come count: a session's tags are those of its requirement's, too.
USABLE = [version for version in ENGINE_PYTHONS if is_here(version) or (version in OF_DEBIAN and pythons.possible())]
