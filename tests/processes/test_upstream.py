"""``make upstream``: what it makes of a distribution whose patches change how its tests end, or of no test at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="from Python 3.11 on")

from tests.upstream import compare

TESTS = """
from pathlib import Path
import toy

def test_that_is_the_same():
    pass

def test_of_the_patch():
    assert not toy.patched, "the patch broke this"

def test_that_ends_otherwise_each_time():
    before = Path("before")
    first = not before.exists()
    before.touch() if first else before.unlink()
    assert first != toy.patched
"""
REPORT = json.dumps({"patches": [{"name": "toy-patch", "status": "applied", "reason": ""}]})
AT_START = f"""
import os, toy
toy.patched = True
with open(os.environ["RLHF_PATCHES_REPORT"], "a") as report:
    report.write({REPORT!r} + "\\n")
"""
TOY = compare.Upstream("pytest", "toy", {"tests/test_toy.py": []})  # of the distribution only the version is asked


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Status and output of the command for a distribution with these tests."""

    def run_(tests: str, at_start: str = AT_START, beside: str | None = None) -> tuple[int, str]:
        installed, sdist, root = (tmp_path / name for name in ("installed", "sdist", "root"))
        for folder in (installed, sdist / "tests", root / "site_hook"):
            folder.mkdir(parents=True)
        (installed / "toy.py").write_text("patched = False\n")
        if beside is not None:
            (sdist / "toy.py").write_text(beside)
        (sdist / "tests" / "test_toy.py").write_text(tests)
        (root / "site_hook" / "rlhf_patches.pth").write_text(at_start)
        monkeypatch.setenv("PYTHONPATH", str(installed))
        monkeypatch.setattr(compare, "ROOT", root)
        monkeypatch.setattr(compare, "chosen", lambda: {TOY.name: TOY})
        monkeypatch.setattr(compare, "tests_of", lambda name, version: sdist)
        status = compare.main([])
        return status, capsys.readouterr().out

    return run_


def test_a_test_that_ends_otherwise_with_the_patches_is_named(run):
    status, said = run(TESTS)
    assert status == 1
    lines = said.splitlines()
    assert [line for line in lines if line.startswith("DIFFERS")] == [
        "DIFFERS tests/test_toy.py: tests.test_toy.test_of_the_patch: passed, passed, passed as released; "
        + ", ".join(["failure (AssertionError)"] * 3)
        + " with every patch on"
    ]
    (flaky,) = [line for line in lines if line.startswith("flaky")]
    assert "test_that_ends_otherwise_each_time: passed, failure" in flaky
    assert "3 tests of 1 files (3 passed); 1 differ" in said
    assert lines[-1].endswith("on: toy-patch")


def test_what_ends_alike_is_no_difference_a_failure_too(run):
    status, said = run("import toy\n\ndef test_a():\n    raise OSError('no hub')\n")
    assert status == 0
    assert "1 tests of 1 files (1 failure); 0 differ" in said


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tests": "import toy\n"}, "status 5"),  # pytest's, for no test
        ({"tests": "import nothing_of_this_name\n"}, "status 2"),
        ({"tests": TESTS, "beside": "patched = False\n"}, "not what is installed"),
        ({"tests": "import toy\n\ndef test_a():\n    pass\n", "at_start": ""}, "no patch was on"),
    ],
    ids=["no test", "not collected", "not the installed", "no patch"],
)
def test_nothing_compared_is_an_error(run, more, why):
    status, said = run(**more)
    assert status == 1
    assert "NOT COMPARED" in said
    assert why in said
