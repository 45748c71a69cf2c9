"""``rlhf-patches check``, run as a user runs it: what it says of releases, and what it leaves alone."""

from __future__ import annotations

import os
import sys
import tarfile
import venv

import pytest

from rlhf_patches.definitions.registry import Registered
from rlhf_patches.definitions.status import Status
from rlhf_patches.guards.edits import Edit, Unrecognized
from rlhf_patches.guards.places import Source
from rlhf_patches.guards.rewriting import check_lines
from rlhf_patches.offline import download
from rlhf_patches.offline.archive import open_release
from rlhf_patches.offline.download import DownloadError, fetch, parse
from rlhf_patches.offline.evaluate import check
from rlhf_patches.patches import plugin
from tests.harness import toy_slime
from tests.harness.downloads import broken_pip, cached
from tests.harness.toy_slime import DEFECT

NAMES = [patch.name for patch in plugin.rlhf_patches()]


# ------------------------------------------------------------------------------------------------ the rewrite


def test_every_built_in_rewrite_passes_the_thorough_check(slime_wheel):
    """The toy has the one; frameworks as released have the others (tests/patches)."""
    report = check(open_release(slime_wheel()), [Registered(patch, "x") for patch in plugin.rlhf_patches()])
    (row,) = [row for row in report if row.version and row.status not in (Status.UNAFFECTED, Status.ABSENT)]
    assert (row.name, row.status) == (toy_slime.PATCH, Status.APPLIES)


CODE = """\
def f(x):
    a = (x,
         1)
    b = 2
    c = 3
    d = 4
    return a, b, c, d


def g():
    return f(1)
"""


def edits(*changes):
    """Edits by what they replace; each old text occurs once."""
    for old, _ in changes:
        assert CODE.count(old) == 1
    return [Edit(CODE.index(old), CODE.index(old) + len(old), new) for old, new in changes]


SOURCE = Source("m", "m.py", CODE)


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("b = 2", "b = 22")],
        [("(x,\n         1)", "(x\n, 2)")],
    ],
)
def test_edits_that_move_nothing(changes):
    check_lines(SOURCE, edits(*changes))


@pytest.mark.parametrize(
    "changes",
    [
        # The number of lines stays as it is: one is added here, another is taken away there.
        [("(x,\n         1)", "(x, 1)"), ("d = 4", "d = 4\n    d = 5")],
        [("b = 2", "b = 2\n"), ("d = 4\n    return", "d = 4; return")],
        [("b = 2", "b = 2\n    b = 3"), ("\n\n\ndef g", "\n\ndef g")],
        [("def f(x):\n", "def f(x):\n\n"), ("\n\n\ndef g", "\n\ndef g")],
        [("b = 2", "b = 2\n"), ("    return f(1)\n", "    return f(1)")],
    ],
)
def test_edits_that_move_a_line(changes):
    with pytest.raises(Unrecognized, match=r"would move code in line \d+ of m\.py"):
        check_lines(SOURCE, edits(*changes))


def test_edits_that_do_not_compile_or_change_the_number_of_lines():
    with pytest.raises(Unrecognized, match="does not compile"):
        check_lines(SOURCE, edits(("b = 2", "b = = 2")))
    with pytest.raises(Unrecognized, match="number of lines"):
        check_lines(SOURCE, edits(("b = 2", "b = 2\n")))


def test_a_rewrite_that_moves_a_line_is_refused_in_a_release(slime_wheel, monkeypatch):
    from rlhf_patches.guards import patterns

    def moving(rewrite, source, node):
        """Changes the function, and moves its lines down by one: the last line break makes room."""
        body, defect = source.text.index("    assert"), source.text.index(DEFECT)
        end = len(source.text) - 1
        return [Edit(body, body, "\n"), Edit(defect, defect + len(DEFECT), "True"), Edit(end, end + 1, "")]

    patches = [Registered(p, "x") for p in plugin.rlhf_patches() if p.name == toy_slime.PATCH]
    wheel = slime_wheel(change=lambda text: text + "    first = 1\n    second = 2\n    return first, second\n")
    assert check(open_release(wheel), patches)[toy_slime.PATCH].status is Status.APPLIES
    monkeypatch.setattr(patterns, "find_edits", moving)
    row = check(open_release(wheel), patches)[toy_slime.PATCH]
    assert row.status is Status.REFUSED
    assert "would move code in line" in row.reason


# ------------------------------------------------------------------------------------------------ NAME==VERSION


@pytest.mark.parametrize("text", ["Verl==0.9.1", "verl == 0.9.1", "verl==0.9.1 ", "VERL== 0.9.1"])
def test_spellings_of_name_and_version(text):
    assert parse(text) == ("verl", "0.9.1")
    assert parse("ms_Swift==4.0+cu128") == ("ms-swift", "4.0+cu128")


def test_a_cache_that_cannot_be_written_to(tmp_path, monkeypatch):
    """Its folders are there already; root may write everywhere, so the error is made here."""

    def fail(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(download.tempfile, "TemporaryDirectory", fail)
    with pytest.raises(DownloadError, match=r"cannot be used.*choose another with --cache"):
        fetch("slime==0.1.0", tmp_path / "cache")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index that is a folder, for `fetch` in this process."""
    (tmp_path / "wheels").mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "wheels"


@pytest.mark.one_python
def test_a_wheel_for_another_python_and_machine(slime_wheel, tmp_path, index, monkeypatch):
    monkeypatch.setattr(download, "_PYTHONS", ("3.9",))
    slime_wheel(tag="cp39-cp39-manylinux2014_aarch64")
    found = fetch("slime==0.1.0", tmp_path / "cache")
    assert found.name == "slime-0.1.0-cp39-cp39-manylinux2014_aarch64.whl"
    assert cached(tmp_path) == [str(found.relative_to(tmp_path / "cache"))]


def test_an_index_that_cannot_be_reached_is_not_one_without_the_release(tmp_path, monkeypatch):
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/",  # where nothing listens
        "PIP_RETRIES": "1",  # of which the first comes at once
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DownloadError, match=r"^pip could not reach an index for slime==0\.1\.0: connection"):
        fetch("slime==0.1.0", tmp_path / "cache")


def test_an_index_with_an_sdist_only_runs_nothing_of_it(tmp_path, index, monkeypatch):
    monkeypatch.setattr(download, "_PYTHONS", ())
    marker = tmp_path / "marker"
    (tmp_path / "setup.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    with tarfile.open(index / "slime-0.1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "setup.py", "slime-0.1.0/setup.py")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")  # not even where the user's settings ask for sdists
    with pytest.raises(DownloadError, match=r"neither a wheel nor an sdist of slime==0.1.0.*No matching.*its path"):
        fetch("slime==0.1.0", tmp_path / "cache")
    assert not marker.exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("ending", ["sys.exit('ERROR: no space left')", "os.kill(os.getpid(), 9)"])
def test_a_pip_that_fails_half_way_leaves_no_wheel(tmp_path, monkeypatch, ending):
    """It copies the wheel to where it was told to, and a full disk ends that in the middle."""
    text = (
        "import os, sys\nfolder = sys.argv[sys.argv.index('--dest') + 1]\n"
        f"open(os.path.join(folder, 'slime-0.1.0-py3-none-any.whl'), 'w').write('half')\n{ending}\n"
    )
    monkeypatch.setenv("PYTHONPATH", broken_pip(tmp_path, text))
    with pytest.raises(DownloadError, match=r"slime==0\.1\.0"):
        fetch("slime==0.1.0", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_fetch_that_fails_leaves_the_folders_of_others(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", broken_pip(tmp_path))
    (tmp_path / "cache" / "wheels").mkdir(parents=True)
    with pytest.raises(DownloadError):
        fetch("slime==0.1.0", tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["wheels"]


@pytest.mark.one_python
def test_uv_where_there_is_no_pip(tmp_path, monkeypatch, slime_wheel, index):
    """An environment that uv has made has none; `uv tool run pip` fetches it."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f'#!/bin/sh\n[ "$1 $2 $3 $4" = "tool run --quiet pip" ] || exit 9\nshift 4\nexec {sys.executable} -m pip "$@"\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:/usr/bin:/bin")
    bare = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(download.sys, "executable", bare)
    monkeypatch.setattr(download.sys, "_base_executable", bare)
    monkeypatch.setattr(download, "_PYTHONS", ())
    slime_wheel()
    assert fetch("slime==0.1.0", tmp_path / "cache").name == "slime-0.1.0-py3-none-any.whl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(uv))  # no folder
    fetched = fetch("slime==0.1.0")
    assert (fetched.exists(), fetched.is_relative_to(uv)) == (True, False)
    with pytest.raises(DownloadError, match=r"slime==9.*The newest wheels are 0\.1\.0"):
        fetch("slime==9", tmp_path / "cache")


def test_a_python_without_pip(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(download.sys, "executable", bare)
    monkeypatch.setattr(download.sys, "_base_executable", bare)
    monkeypatch.setenv("PATH", str(tmp_path))  # nor uv
    with pytest.raises(DownloadError, match=r"bare/bin/python has no pip to fetch slime==0.1.0, and uv is not"):
        fetch("slime==0.1.0", tmp_path / "cache")
    assert sys.executable.endswith("bare/bin/python")
    assert cached(tmp_path) == []
