"""``rlhf-patches new --from-diff``: what of a diff is drafted, what is not and why, and what is skipped."""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

OLD = '''\
import math

LIMIT = 3


class Model:
    scale = 2

    def loss(self, x):
        """Of x."""
        return x - self.scale

    def other(self, x):
        return x


def total(xs):
    found = 0
    for x in xs:
        found += x
    return found
'''
FIXED = '''\
import math
import operator

LIMIT = 4


class Model:
    scale = 3

    def loss(self, x):
        """Of x, with the right sign."""
        return x + self.scale

    def other(self, x, y=0):
        return x + y


def helper(x):
    return operator.neg(x)


def total(xs):
    found = 0
    for x in xs:
        found += helper(x)
    return found
'''
MAIL = """\
From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001
From: Some Body <some@body.invalid>
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: [PATCH 2/3] =?UTF-8?q?The=20sign=20of=20the=20loss=E2=80=A6?=,
 which was wrong

See the issue.
---
 src/pkg/mod.py | 2 +-

"""


def diff(path, old, new, context=1):
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}", n=context)
    return f"diff --git a/{path} b/{path}\nindex 0123456..789abcd 100644\n" + "".join(lines)


@pytest.fixture
def package(written):
    """A framework."""
    return written(OLD)


@pytest.fixture
def new(said, tmp_path):
    """Runs the command on a diff."""

    def run(text, *arguments):
        file = tmp_path / "fix.patch"
        file.write_text(text)
        return said("new", "some-fix", "--from-diff", file, *arguments)

    return run


def imported(folder, monkeypatch):
    """The patch of the plugin in a folder."""
    for name in ("rlhf_patches_some_fix.patch", "rlhf_patches_some_fix"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(os.path.abspath(folder))
    return importlib.import_module("rlhf_patches_some_fix.patch").PATCH


@pytest.mark.parametrize("root", ["", "src/", "python/framework/"])
def test_a_mailed_fix_becomes_a_plugin_that_repairs(new, package, engine, monkeypatch, root):
    fixed = OLD.replace("x - self.scale", "x + self.scale")
    text = MAIL + diff(f"{root}{package.name}/mod.py", OLD, fixed) + "-- \n2.39.0\n\n"
    status, out, err = new(text, "--into", f"fix{len(root)}")
    assert (status, err) == (0, "")
    assert f"  drafted: {package.path('mod:Model.loss')}, 1 rewrite\n" in out
    patch = imported(f"fix{len(root)}", monkeypatch)
    assert patch.summary == "The sign of the loss…, which was wrong"
    assert str(patch.variants[0].guard) == f"{package.distribution} ==1.0"
    module = package.load("mod")
    assert module.Model().loss(5) == 3
    engine(patch).apply()
    assert module.Model().loss(5) == 7


def test_each_hunk_says_what_is_drafted_and_what_is_not(new, package, engine, monkeypatch):
    status, out, err = new(diff(f"{package.name}/mod.py", OLD, FIXED, context=0))
    assert status == 0
    assert err == "rlhf-patches: 6 changes are not drafted: the patch is refused until you have written them\n"
    blocks = {}
    for line in out.partition("wrote a patch")[0].splitlines():
        if not line.startswith("  "):
            blocks[line] = current = []
        else:
            current.append(line.strip())
    told = list(blocks.values())
    name = f"{package.name}.mod"
    uses = "a Rewrite's `uses` brings what its replacement needs"
    once = "code that runs once, at import, before it can be patched: Wrap or Replace its users"
    of_class = "code of the class Model, which exists before it can be patched: Wrap or Replace its methods"
    parameters = (
        "its parameters become (self, x, y=0), which a change of its code cannot do: Wrap or Replace the function"
    )
    neither = "the new code of total uses helper, which neither it nor its module defines"
    assert told == [
        [f"NOT DRAFTED: {name}: an import: {uses}"],
        [f"NOT DRAFTED: {name}: {once}"],
        [f"NOT DRAFTED: {name}: {of_class}"],
        [f"drafted: {name}:Model.loss, 1 rewrite"],
        [
            f"NOT DRAFTED: {name}:Model.other: {parameters}",
            f"NOT DRAFTED: {name}:helper is new: put it into your package; {uses}",
        ],
        [f"NOT DRAFTED: {name}:total: {neither}: write a Rewrite whose `uses` brings it"],
    ]
    # Half a fix is not applied.
    patch = imported("some-fix", monkeypatch)
    module = package.load("mod")
    one = engine(patch)
    one.apply()
    assert one.report()[patch.name].status == "refused"
    assert module.Model().loss(5) == 3
    # What is not drafted is left to the author, so that the plugin's test fails.
    text = Path("some-fix/rlhf_patches_some_fix/patch.py").read_text()
    assert text.count("# TODO: ") == 8  # with the change that has it refused, the harm and the signatures
    assert "helper is new" in text


def test_comments_docstrings_and_what_is_removed_need_nothing(new, package):
    fixed = (
        OLD.replace("Of x.", "Of an x.").replace("x - self", "x + self").replace(OLD[OLD.index("\n\ndef total") :], "")
    )
    status, out, _ = new(diff(f"{package.name}/mod.py", OLD, fixed, context=0))
    assert status == 0
    assert f"no change needed: {package.path('mod:total')} is removed, which needs no patch" in out
    text = OLD.replace("Of x.", "Of an x.").replace("    found = 0", "    # nothing yet\n    found = 0")
    status, out, err = new(diff(f"{package.name}/mod.py", OLD, text), "--into", "another")
    assert status == 2
    assert out.count("only comments, docstring or annotations") == 2
    assert "so no file is written" in err


def test_what_is_no_code_of_the_package_is_skipped(new, package):
    renamed = "diff --git a/{0} b/{1}\nsimilarity index 100%\nrename from {0}\nrename to {1}\n"
    added = "--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+x = 1\n"
    fixed = OLD.replace("x - self.scale", "x + self.scale")
    parts = [
        diff("README.md", "a\n", "b\n"),
        diff("tests/test_mod.py", "a\n", "b\n"),
        diff(f"docs/{package.name}/mod.py", OLD, fixed),
        diff("elsewhere/mod.py", OLD, fixed),
        added.format(f"{package.name}/fresh.py"),
        renamed.format(f"{package.name}/one.py", f"{package.name}/two.py"),
        diff(f"{package.name}/mod.py", OLD, fixed),
    ]
    status, out, err = new("".join(parts))
    assert (status, err) == (0, "")
    new_module = "a new module: put the parts that the fix needs into your package, and name them in `uses`"
    skipped = dict(line.removeprefix("skipped: ").split(": ", 1) for line in out.splitlines() if line[:4] == "skip")
    assert skipped == {
        "README.md": "not Python",
        "tests/test_mod.py": "tests, documentation or examples",
        f"docs/{package.name}/mod.py": "tests, documentation or examples",
        "elsewhere/mod.py": "there is no such module installed here",
        f"{package.name}/fresh.py": new_module,
        f"{package.name}/two.py": "no hunk: renamed, its mode changed, or a merge (`git diff MERGE^ MERGE`)",
    }


def test_lines_that_have_moved_are_found_and_others_are_not_guessed(new, package):
    fixed = OLD.replace("x - self.scale", "x + self.scale")
    moved = diff(f"{package.name}/mod.py", "# more\n" * 9 + OLD, "# more\n" * 9 + fixed)
    assert new(moved)[0] == 0
    other = diff(f"{package.name}/mod.py", OLD.replace("x - self", "y - self"), fixed)
    for text, why in (
        (other, "its lines do not match"),
        (diff(f"{package.name}/mod.py", FIXED, OLD.replace("LIMIT = 3", "LIMIT = 5")), "its lines do not match"),
        (diff(f"{package.name}/mod.py", OLD.replace("x - self", "x * self"), OLD), "the code already has this change"),
    ):
        status, out, err = new(text, "--into", "another")
        assert (status, os.path.exists("another")) == (2, False)
        assert why in out
        assert "so no file is written" in err


def test_half_a_file_is_not_drafted(new, package):
    fixed = OLD.replace("x - self.scale", "x + self.scale").replace("found += x", "found -= x")
    text = (
        diff(f"{package.name}/mod.py", OLD, fixed)
        .replace(" found = 0", " found = 1")
        .replace("-        found += x", "-        found *= x")
    )
    status, out, _ = new(text)
    assert status == 2
    assert "another hunk of this file does not fit, so none is drafted" in out


def test_wrong_input_is_one_line(new, said, package, monkeypatch, tmp_path):
    fixed = diff(f"{package.name}/mod.py", OLD, OLD.replace("x - self", "x + self"))
    cases = [
        ("no diff at all\n", (), "the input has no hunk"),
        (fixed.replace("+        return", "*        return"), (), "is not a valid unified diff"),
        (fixed, ("--kind", "wrap"), "--kind requires --target"),
        (fixed, ("--pattern", "x"), "--pattern requires --target"),
    ]
    for text, arguments, why in cases:
        status, out, err = new(text, *arguments)
        assert (status, out) == (2, ""), why
        assert why in err
        assert err.count("\n") == 1
    assert said("new", "some-fix", "--from-diff", "nowhere.patch")[::2] == (
        2,
        "rlhf-patches: nowhere.patch cannot be read: [Errno 2] No such file or directory: 'nowhere.patch'\n",
    )
    assert os.listdir() == []


def test_without_unidiff_that_is_said_before_anything_is_read(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "unidiff.patch", None)
    status, out, err = said("new", "some-fix", "--from-diff", "nowhere.patch", "--in", "nowhere.whl")
    assert (status, out) == (2, "")
    assert err == (
        "rlhf-patches: --from-diff needs unidiff, which reads diffs (the extra `author`) and is not installed here: "
        "python -m pip install unidiff\n"
    )


def test_a_fix_of_two_distributions_is_refused(new, package, said):
    other = package.site / "other"
    other.mkdir()
    (other / "__init__.py").touch()
    (other / "mod.py").write_text(OLD)
    info = package.metadata("2.0", folder="other-2.0.dist-info")
    (info / "METADATA").write_text("Name: other\nVersion: 2.0\n")
    (info / "RECORD").write_text("other/mod.py,,\n")
    fixed = OLD.replace("x - self.scale", "x + self.scale")
    status, _, err = new(diff(f"{package.name}/mod.py", OLD, fixed) + diff("other/mod.py", OLD, fixed))
    assert status == 2
    assert "expected one distribution" in err
    assert os.listdir() == []


def test_what_git_itself_writes_is_read(new, package, tmp_path):
    repository = tmp_path / "repository"
    (repository / "src" / package.name).mkdir(parents=True)
    file = repository / "src" / package.name / "mod.py"
    file.write_text(OLD)

    def git(*arguments):
        identity = ["-c", "user.name=Some Body", "-c", "user.email=some@body.invalid"]
        command = ["git", *identity, "-C", str(repository), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "Before")
    file.write_text(OLD.replace("x - self.scale", "x + self.scale"))
    git("commit", "-qam", "The sign of the loss\n\nIt was wrong.")
    for text in (git("format-patch", "--stdout", "HEAD^"), git("diff", "HEAD^"), git("show")):
        status, out, err = new(text, "--into", f"fix{len(text)}")
        assert (status, err) == (0, "")
        assert "drafted:" in out


SEPARATORS = ["\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\0"]


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_a_path_is_no_code_in_what_is_written(new, package, monkeypatch, tmp_path, separator):
    """The folders above a package are a repository's, of any name; what is left to do is said with them."""
    marker = tmp_path / "marker"
    code = f"{separator}open({os.fspath(marker).replace('/', '%')!r}.replace('%', chr(47)), 'w')#"
    text = diff(f"x{code}/{package.name}/mod.py", OLD, FIXED, context=0)
    status, out, _ = new(MAIL.replace("The=20sign", "The=00=0C=20sign") + text)
    assert (status, out.count("NOT DRAFTED")) == (0, 6)
    assert imported("some-fix", monkeypatch).name == "some-fix"
    assert not marker.exists()
    for file in Path("some-fix").rglob("*.py"):
        written = file.read_bytes().decode()
        ast.parse(written)
        assert all(line.isprintable() for line in written.split("\n")), file
        assert written.splitlines() == written.removesuffix("\n").split("\n"), file


@pytest.mark.parametrize(
    ("metadata", "left"),
    [
        ('Name: x"""; open("marker", "w"); """\nVersion: 1.0\n', "which distribution on PyPI this is"),
        (f"Name: other\nVersion: {'1' * 5000}\n", "has no PEP 440 version"),
        ("Name: other\nVersion: one\n", "has no PEP 440 version"),
    ],
)
def test_metadata_are_no_code_in_what_is_written(new, package, monkeypatch, tmp_path, metadata, left):
    release = tmp_path / "release"
    (release / package.name).mkdir(parents=True)
    (release / package.name / "__init__.py").touch()
    (release / package.name / "mod.py").write_text(OLD)
    (release / "PKG-INFO").write_text(metadata)
    fixed = OLD.replace("x - self.scale", "x + self.scale")
    assert new(diff(f"{package.name}/mod.py", OLD, fixed), "--in", release)[0] == 0
    assert imported("some-fix", monkeypatch).name == "some-fix"
    assert f"# TODO: {left}" in Path("some-fix/rlhf_patches_some_fix/patch.py").read_text().replace(
        "which releases have the bug; the one that was read ", ""
    )
    assert not any(b"open(" in file.read_bytes() for file in Path("some-fix").rglob("*.*") if file.is_file())
    assert os.listdir() == ["some-fix"]


HUNK = "--- a/{}/mod.py\n+++ b/{}/mod.py\n@@ -11,1 +11,{} @@\n         return x - self.scale\n"


@pytest.mark.one_python
def test_a_fix_has_a_bound(new, package, said):
    """A draft takes the square of its lines, and what is named may never end."""
    name = package.name
    many = "".join(f"@@ -{n},1 +{n},1 @@\n-x\n+y\n" for n in range(1, 9999))
    for text in (
        HUNK.format(name, name, 300_001) + "+        y = x + 1\n" * 300_000,
        HUNK.partition("@@")[0].format(name, name) + many,
    ):
        status, out, err = new(text)
        assert (status, out.count("\n"), err.count("\n")) == (2, 2, 1)
        assert "expected 200 of 1000 at most" in out
        assert "so no file is written" in err
    status, out, err = said("new", "some-fix", "--from-diff", "/dev/zero")
    assert (status, out, err) == (2, "", "rlhf-patches: /dev/zero has more than 8 MiB\n")
    # Beside a part that is drafted it is left to do.
    fixed = OLD.replace("x - self.scale", "x + self.scale")
    package.list(package.write("more", OLD), package.site / name / "mod.py")
    text = diff(f"{name}/more.py", OLD, fixed) + HUNK.format(name, name, 2001) + "+        y = 1\n" * 2000
    status, out, err = new(text)
    assert (status, "1 change is not drafted" in err) == (0, True)
