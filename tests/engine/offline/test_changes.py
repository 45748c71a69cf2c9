"""``diff --format patch``: a file that git and patch take, and that makes what the engine compiles."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rlhf_patches import Replace, Rewrite, Wrap, fingerprint
from rlhf_patches.guards import locating, shapes
from rlhf_patches.guards.edits import edited
from rlhf_patches.offline import changes
from rlhf_patches.offline.changes import NotAFile

TEXT = "def f(a):\n    x = 'ä\x0cb'\n    return max(\n        a,\n        0,\n    )\n\n\ndef g(a):\n    return a - 1"


def git(folder, *arguments, **options):
    identity = ["-c", "user.name=Some Body", "-c", "user.email=some@body.invalid"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


@pytest.fixture
def case(framework):
    """A patch of a file that does not end in a line break, and what the engine compiles of it."""
    file = framework.write("sub.mod", TEXT)
    first = Rewrite(framework.path("sub.mod:f"), "max($A, 0)", "abs($A)")
    second = Rewrite(framework.path("sub.mod:g"), "a - 1", "$ADD(a, 1)", uses={"ADD": "operator:add"})
    patch = framework.patch(first, second)
    source = locating.read_module(f"{framework.name}.sub.mod")
    edits = [edit for change in (first, second) for edit in shapes.recognize(change, source).edits]
    return patch, file, edited(source.text, edits)


@pytest.fixture
def copy(framework, case, tmp_path):
    """A repository with a copy of the package in it."""
    folder = tmp_path / "repository"
    shutil.copytree(framework.site / framework.name, folder / framework.name)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "As released")
    return folder


@pytest.mark.parametrize("command", [("git", "apply", "--check"), ("git", "am"), ("patch", "-p1", "-s")])
def test_the_file_becomes_what_the_engine_compiles(framework, case, copy, tmp_path, command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs the command {command[0]}")
    patch, file, compiled = case
    exported = tmp_path / "exported.patch"
    exported.write_text(changes.patch_file(patch), encoding="utf-8")
    if command[0] == "patch":
        subprocess.run([*command, "-d", str(copy), "-i", str(exported)], check=True, capture_output=True)
    else:
        git(copy, *command[1:], str(exported))
        if command[-1] == "--check":
            git(copy, "apply", str(exported))
    changed = copy / file.relative_to(framework.site)
    assert changed.read_bytes() == compiled.encode()
    assert compiled != TEXT
    assert git(copy, "status", "--porcelain").split() in ([], ["M", str(file.relative_to(framework.site))])
    if command == ("git", "am"):
        assert git(copy, "log", "-1", "--format=%s") == f"{patch.name}: {patch.summary}\n"


def test_its_head_says_what_it_is_and_what_it_needs(framework, case):
    patch, _, _ = case
    head = changes.patch_file(patch).partition("---\n")[0].splitlines()
    assert head == [
        f"From: rlhf-patches <{patch.name}@rlhf-patches.invalid>",
        f"Subject: [PATCH] {patch.name}: a bug",
        "",
        "Reference: https://example.invalid/1",
        f"Affected: {framework.distribution}",
        f"Made from: {framework.distribution} 1.0 in {framework.site}",
        "Needs: operator:add",
    ]


@pytest.mark.parametrize("kind", [Replace, Wrap])
def test_what_is_called_in_memory_is_no_patch_of_a_file(framework, kind):
    framework.write("mod", "def f(a):\n    return a\n")
    patch = framework.patch(
        kind(framework.path("mod:f"), "operator:neg", {fingerprint("def f(a): return a", "f"): "1.0"})
    )
    assert "# " in changes.diff(patch)
    with pytest.raises(NotAFile, match="is replaced or wrapped in memory"):
        changes.patch_file(patch)


@pytest.mark.parametrize("data", [b"def f(a):\r\n    return a - 1\r\n", b"\xef\xbb\xbfdef f(a):\n    return a - 1\n"])
def test_a_file_that_the_patch_would_not_fit_is_refused(framework, data):
    framework.write("mod", "").write_bytes(data)
    patch = framework.patch(Rewrite(framework.path("mod:f"), "a - 1", "a + 1"))
    assert "+    return" in changes.diff(patch)
    with pytest.raises(NotAFile, match="is not UTF-8 with plain line ends"):
        changes.patch_file(patch)
