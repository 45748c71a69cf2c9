"""What is shared by the tests of an author's commands."""

from __future__ import annotations

import pytest


@pytest.fixture
def listed(framework):
    """The framework's metadata, which lists its files as pip does; returns the framework."""

    def write(*files):
        info = framework.metadata("1.0")
        lines = [f"{file.relative_to(framework.site).as_posix()},sha256=x,1" for file in files]
        (info / "RECORD").write_text("\n".join([*lines, ""]))

    framework.list = write
    return framework


@pytest.fixture
def written(listed, tmp_path, monkeypatch):
    """Writes the framework's only module; the working directory is empty. Returns the framework."""

    def write(text):
        listed.list(listed.write("mod", text))
        folder = tmp_path / "here"
        folder.mkdir()
        monkeypatch.chdir(folder)
        return listed

    return write
