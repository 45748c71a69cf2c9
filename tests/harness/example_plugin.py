"""The example plugin and its toy framework, built from a copy of `examples/plugin` and installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness.installed import ROOT, Installed, wheel_of
from tests.harness.once import once


@pytest.fixture(scope="session")
def with_toy(installed: Installed, of_the_session: Path) -> Installed:
    """An environment with this package and the toy framework, to be left as it is."""
    return _with("with_toy", installed, "toy_framework", of_the_session)


@pytest.fixture(scope="session")
def with_example(with_toy: Installed, of_the_session: Path) -> Installed:
    """The same with the example plugin, whose sources are in the folder ``plugin`` beside it."""
    return _with("with_example", with_toy, ".", of_the_session)


def _with(name: str, base: Installed, project: str, of_the_session: Path) -> Installed:
    """A copy of an environment with one of the projects installed, made once per session."""

    def make(out: Path) -> str:
        made = base.copy(out / "environment")
        made.pip_install(_wheel(project, out))
        return str(made.folder)

    return Installed(Path(once(of_the_session / name, name, make)))


def _wheel(project: str, out: Path) -> Path:
    left = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "examples" / "plugin", out / "plugin", ignore=left)
    return wheel_of(out / "plugin" / project, out)
