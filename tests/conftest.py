"""What the tests of the engine and those on real frameworks share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from installed import Installed, build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def make_installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Installed]:
    """Makes virtual environments with the wheel installed, for tests that change theirs."""
    return lambda: Installed.create(tmp_path_factory.mktemp("environment"), wheel)


@pytest.fixture(scope="session")
def installed(make_installed: Callable[[], Installed]) -> Installed:
    """One such environment, to be left as it is."""
    return make_installed()
