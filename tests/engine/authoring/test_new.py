"""``rlhf-patches new``: what is written, what is known, and that nothing is written where something is wrong."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
from pathlib import Path

import pytest

from rlhf_patches import Patch, Replace, Rewrite, Wrap, fingerprint

TEXT = """\
LIMIT = 3


class Model:
    def loss(self, x, __hidden=LIMIT, *rest, scale: float = 1.0, **more):
        return x - scale

    async def later(self, x):
        return x

    async def each(self):
        yield 1


def loss(x):
    return x - len(x)
"""


@pytest.fixture
def target(written):
    """A function."""
    return written(TEXT).path("mod:loss")


@pytest.fixture
def patch_of(monkeypatch):
    """Imports the patch of a plugin in the working directory."""

    def load(name):
        importlib.invalidate_caches()
        monkeypatch.syspath_prepend(os.path.abspath(name))
        return importlib.import_module(f"rlhf_patches_{name.replace('-', '_')}.patch").PATCH

    return load


def test_what_can_be_known_is_filled_in(said, target, patch_of, framework):
    status, out, err = said("new", "some-bug", "--target", target, "--pattern", "x - $A", "--replacement", "x + $A")
    assert (status, err) == (0, "")
    assert "some-bug/tests/test_patch.py" in out
    patch = patch_of("some-bug")
    assert isinstance(patch, Patch)
    assert patch.name == "some-bug"
    assert str(patch.variants[0].guard) == f"{framework.distribution} ==1.0"
    assert patch.variants[0].changes == (Rewrite(target, "x - $A", "x + $A"),)
    left = {
        name
        for name in ("summary", "symptom", "cause", "repair", "obsolete_when")
        if getattr(patch, name)[:5] == "TODO:"
    }
    assert left == {"summary", "symptom", "cause", "repair", "obsolete_when"}
    assert patch.references[0].startswith("TODO:")


def test_what_is_not_known_is_not_guessed(said, target, patch_of, framework):
    shutil.rmtree(framework.metadata("1.0"))
    status, _, err = said("new", "unowned-bug", "--target", target)
    assert status == 0
    assert err == (
        f"rlhf-patches: no metadata list {framework.site / framework.name / 'mod.py'}: set the distribution yourself\n"
    )
    assert str(patch_of("unowned-bug").variants[0].guard) == "unknown"
    assert "# TODO: which distribution" in Path("unowned-bug/rlhf_patches_unowned_bug/patch.py").read_text()


def test_a_release_is_read_in_place_of_what_is_installed(said, target, patch_of, framework, tmp_path):
    release = tmp_path / "release"
    (release / framework.name).mkdir(parents=True)
    (release / framework.name / "__init__.py").touch()
    (release / framework.name / "mod.py").write_text("def loss(x):\n    return x * 2 * 2\n")
    (release / "PKG-INFO").write_text("Name: other\nVersion: 3.0+cpu\n")
    status, _, err = said("new", "released-bug", "--target", target, "--pattern", "2", "--in", release)
    assert (status, err) == (0, "")
    variant = patch_of("released-bug").variants[0]
    assert str(variant.guard) == "other ==3.0"
    assert variant.changes[0].matches == 2


@pytest.mark.parametrize("arguments", [(), ("--pattern", "x - $A")])
def test_an_unfinished_rewrite_is_refused(said, target, patch_of, engine, framework, arguments):
    name = f"unfinished-{len(arguments)}"
    assert said("new", name, "--target", target, *arguments)[0] == 0
    one = engine(patch_of(name))
    framework.load("mod")
    one.apply()
    assert one.report()[name].status == "refused", one.report()[name].reason


@pytest.mark.parametrize(
    ("kind", "qualname", "signature"),
    [
        ("wrap", "loss", "(wrapped, instance, args, kwargs)"),
        ("replace", "loss", "(x)"),
        ("replace", "Model.loss", "(self, x, _Model__hidden, *rest, scale, **more)"),
        ("wrap", "Model.later", "(wrapped, instance, args, kwargs)"),
        ("replace", "Model.later", "(self, x)"),
    ],
)
def test_a_function_of_the_right_kind_and_parameters_is_written(
    said, target, patch_of, engine, framework, kind, qualname, signature
):
    name = f"{kind}-{qualname.replace('.', '-').lower()}"
    assert said("new", name, "--target", framework.path(f"mod:{qualname}"), "--kind", kind)[::2] == (0, "")
    patch = patch_of(name)
    (change,) = patch.variants[0].changes
    assert isinstance(change, {"wrap": Wrap, "replace": Replace}[kind])
    assert dict(change.fingerprints) == {fingerprint(TEXT, qualname): "1.0"}
    text = Path(name, f"rlhf_patches_{name.replace('-', '_')}", "repair.py").read_text()
    (function,) = (node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    assert isinstance(function, ast.AsyncFunctionDef) == qualname.endswith("later")
    assert f"{function.name}{signature}:" in text
    module = framework.load("mod")
    one = engine(patch)
    one.apply()
    assert one.report()[name].status == "applied", one.report()[name].reason
    # What is not written yet says so where it is used; it never looks like a repair.
    if qualname == "loss":
        with pytest.raises(NotImplementedError, match="is not written yet"):
            module.loss("")


def test_wrong_input_is_one_line_and_nothing_is_written(said, target, framework):
    module = target.partition(":")[0]
    os.mkdir("taken-name")
    cases = {
        ("taken-name", "--target", target): "taken-name exists already",
        ("Some-Bug", "--target", target): "expected kebab-case",
        ("bug", "--target", target): "expected kebab-case",
        ("some-bug", "--target", f"{module}:nothing"): f"nothing is not defined in {module}",
        ("some-bug", "--target", f"{framework.name}.no:loss"): f"there is no module {framework.name}.no",
        ("some-bug", "--target", module): "expected MODULE:FUNC",
        ("trl-chunked-nll-zero3", "--target", target): "is a built-in patch already",
        ("some-bug", "--target", target, "--in", "nowhere/x.whl"): "nowhere/x.whl does not exist",
        ("some-bug", "--target", target, "--into", "no/such"): "create it first",
        ("some-bug", "--target", target, "--pattern", "y"): "does not contain 'y'",
        ("some-bug", "--target", target, "--pattern", "x", "--replacement", "("): "the rewrite is not possible",
        ("some-bug", "--target", target, "--replacement", "x"): "require --pattern",
        ("some-bug", "--target", target, "--kind", "wrap", "--pattern", "x"): "--pattern is for a rewrite",
        ("some-bug", "--target", f"{module}:Model.each", "--kind", "wrap"): "is an asynchronous generator",
    }
    for arguments, message in cases.items():
        status, out, err = said("new", *arguments)
        assert (status, out) == (2, ""), arguments
        assert message in err
        assert err.count("\n") == 1
    assert os.listdir() == ["taken-name"]
    assert os.listdir("taken-name") == []


def test_a_folder_that_cannot_be_finished_is_not_begun(said, target, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    status, out, err = said("new", "some-bug", "--target", target)
    assert (status, out) == (2, "")
    assert re.fullmatch(r"rlhf-patches: some-bug cannot be written: .*No space left on device.*\n", err)
    assert os.listdir() == []


def test_the_distribution_is_the_one_that_lists_the_file(said, target, patch_of, framework):
    other = framework.metadata("9.0", folder="another-9.0.dist-info")
    (other / "METADATA").write_text("Name: another\nVersion: 9.0\n")
    (other / "RECORD").write_text(f"other/{framework.name}/mod.py,,\n")
    assert said("new", "owned-bug", "--target", target)[0] == 0
    assert patch_of("owned-bug").distribution == framework.distribution


def test_a_pattern_that_occurs_twice(said, target, patch_of, framework):
    framework.write("mod", "def loss(x, y):\n    return abs(x) + abs(y)\n")
    arguments = ["--pattern", "abs($A)", "--replacement", "$A"]
    assert said("new", "twice-bug", "--target", target, *arguments)[::2] == (0, "")
    assert patch_of("twice-bug").variants[0].changes[0].matches == 2
