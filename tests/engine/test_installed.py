"""What is installed, without importlib.metadata: the same as it says, or nothing where only it can tell."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import zipfile

import pytest

from rlhf_patches import installed
from rlhf_patches.guards import locating, memory

FILES = ("METADATA", "PKG-INFO", "", "entry_points.txt", "direct_url.json", "no such file")


def _said(copy):
    said = {}
    for name in FILES:
        try:
            said[name] = copy.read_text(name)
        except (OSError, ValueError) as error:
            said[name] = type(error)
    return os.path.abspath(copy._path), os.path.realpath(copy.locate_file("")), said


def _same(path):
    """Compare each distribution of a path; returns how many there are."""
    found = installed.find(path)
    expected = list(importlib.metadata.distributions(path=path))
    assert sum(map(len, found.values())) == len(expected)
    for name in {*found, *(copy._path.name.lower().rpartition(".")[0].partition("-")[0] for copy in expected)}:
        by_name = [_said(copy) for copy in importlib.metadata.distributions(name=name, path=path)]
        assert [_said(copy) for copy in found.get(installed.normalized(name), [])] == by_name
    return len(expected)


def test_everything_that_is_installed_here():
    assert _same(sys.path) > 10
    for copy in importlib.metadata.distributions():
        name = copy.metadata["Name"]
        if name is not None:
            assert installed.find(sys.path)[installed.normalized(name)]


@pytest.mark.parametrize(
    "folder",
    [
        "a-1.dist-info",
        "A_b.C--d-2.0.dist-info",
        "a..b__c-1-py3.11.egg-info",
        "a.DIST-INFO",
        ".dist-info",
        "dist-info",
        "-1.dist-info",
        "Ünïcode_İ-1.dist-info",
        "a.dist-info.bak",
        "EGG-INFO",
    ],
)
def test_names_that_nobody_would_choose(tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "METADATA").write_bytes(b"Version: 1\r\nX: \xc3\xa9\n")
    (tmp_path / folder / "PKG-INFO").write_bytes(b"\xff")
    (tmp_path / folder / "direct_url.json").mkdir()
    _same([str(tmp_path), str(tmp_path), str(tmp_path / "missing")])


def test_a_file_and_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "a-1.egg-info").write_text("Version: 3\n")
    monkeypatch.chdir(tmp_path)
    assert _same([os.curdir]) == 1


def test_what_is_installed_later(tmp_path):
    """As importlib.metadata, by the folder's time of change."""
    for number in range(3):
        (tmp_path / f"a{number}-1.dist-info").mkdir()
        os.utime(tmp_path, (number, number))
        assert len(installed.find([str(tmp_path)])) == number + 1


def test_where_only_importlib_metadata_can_tell(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "archive.whl", "w") as archive:
        archive.writestr("a-1.dist-info/METADATA", "Version: 1\n")
    for entry in ("archive.whl", "x.egg"):
        assert installed.find([str(tmp_path), str(tmp_path / entry)]) is None
    assert installed.find([tmp_path]) is None
    assert installed.find([str(tmp_path)]) == {}
    finder = type("Finder", (), {"find_distributions": lambda self, context: [], "find_spec": lambda *_: None})()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert installed.find([str(tmp_path)]) is None
    assert installed.others_bring_patches([str(tmp_path)]) is None


OWN = "[rlhf_patches]\nbuilt-in = rlhf_patches.patches.plugin\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("[console_scripts]\nrlhf-patches = rlhf_patches.cli:main\n", False),
        (OWN, False),
        (f"[a]\nb = c\n\n{OWN}\n[d]\ne = f\n", False),
        (f"{OWN}more = theirs\n", True),
        (f"{OWN}[a]\nb = c\n  [rlhf_patches]  \nmore = theirs\n", True),
        ("[rlhf_patches]\nmore=theirs.module [extra]\n", True),
        ("[[rlhf_patches]]\nmore = theirs\n", True),
        ("[rlhf_patches]\n# nothing\n", True),  # asked in vain, which does no harm
        (b"\xff", None),
    ],
)
def test_whether_there_are_other_patches(tmp_path, text, expected):
    """Never False where importlib.metadata has an entry point of others."""
    folder = tmp_path / "a-1.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert installed.others_bring_patches([str(tmp_path)]) is expected
    if expected is not None:
        (copy,) = importlib.metadata.distributions(path=[str(tmp_path)])
        values = {each.value for each in copy.entry_points.select(group="rlhf_patches")} - {installed.OWN_ENTRY_POINT}
        assert not values or expected


def test_real_paths(tmp_path, monkeypatch):
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to("folder/inner")
    (tmp_path / "folder" / "to_file").symlink_to(tmp_path / "folder" / "file")
    (tmp_path / "folder" / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    tails = ("folder", "folder/", "folder//file", "link/../file", "link/x", "folder/to_file", "folder/loop/x", "./link")
    paths = ["", "/", "/..", "x/../../y", *tails, *(f"{tmp_path}/{tail}" for tail in tails)]
    for path in paths:
        assert locating.real_path(path) == os.path.realpath(path), path
    with memory.parsed_once():
        assert [locating.real_path(path) for path in paths] == [os.path.realpath(path) for path in paths]
