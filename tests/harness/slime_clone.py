"""slime's own files of a tag, from a clone of github.com/THUDM/slime that ``SLIME_CLONE`` names: it is not on PyPI."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.harness import look_alikes

CLONE = os.environ.get("SLIME_CLONE", "")
with_clone = pytest.mark.skipif(
    not CLONE,
    reason="SLIME_CLONE names no clone of slime: its functions were NOT run. "
    "`SLIME_CLONE=~/slime .cache/tools/bin/nox -s frameworks -- tests/patches/slime` runs them",
)


def write(folder: Path, tag: str, version: str, files: Sequence[str]) -> Path:
    """Write files of a tag, and metadata that state a version."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shown = subprocess.run(
            ["git", "-C", CLONE, "show", f"{tag}:{file}"], capture_output=True, text=True, check=True
        )
        (folder / file).write_text(shown.stdout)
    look_alikes.write_metadata(folder, "slime", version)
    return folder


class _Anything(SimpleNamespace):
    """In place of a class."""

    def __class_getitem__(cls, parameters: Any) -> type:
        return cls


class _Names(ModuleType):
    """A module of which only names are imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything

    def __reduce__(self) -> Any:
        """By its name, as any module: Ray sends a class with what its methods use."""
        return importlib.import_module, (self.__name__,)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: answers for what is not among the files, and for other packages."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is there already."""


def install(*packages: str) -> None:
    """Let slime's other modules be imported, those for servers and files, of which only names are used; or others'."""
    sys.meta_path.append(_Absent(packages or ("slime", "sglang")))
