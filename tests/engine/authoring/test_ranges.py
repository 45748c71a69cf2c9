"""``rlhf-patches survey --write``: the range in a patch's file becomes that of its code, and nothing else does."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from rlhf_patches import cli
from rlhf_patches.definitions import registry
from rlhf_patches.definitions.registry import Registered
from tests.harness.simple_index import index

__all__ = ["index"]

DEFECT, FIXED = "def step(x):\n    return x * 2\n", "def step(x):\n    return x + x\n"
PLUGIN = """\
# In 1.0 to 1.1, >=1.0,<=1.1.\r
from rlhf_patches import Guard, Patch, Rewrite, Variant\r
\r
PATCH = Patch(\r
    name="toy-step",\r
    summary="s",\r
    symptom="s",\r
    cause="c",\r
    repair="r",\r
    references=("r",),\r
    obsolete_when="never",\r
    variants=(Variant(Guard("Toy", ">=1.0,<=1.1"), (Rewrite("toy.steps:step", "x * 2", "x * 3"),)),),\r
)\r
"""


@pytest.fixture
def write(index, monkeypatch, capsys, tmp_path):
    """Surveys the patch of a module; gives the status, the complaints, and what its file has then."""

    def run(text=PLUGIN, arguments=(), folder=tmp_path):
        folder.mkdir(exist_ok=True)
        file = folder / "toy_plugin.py"
        file.write_bytes(text.encode())
        spec = importlib.util.spec_from_file_location("toy_plugin", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, "toy_plugin", module)
        monkeypatch.setattr(registry, "load", lambda: ([Registered(module.PATCH, "plug")], []))
        status = cli.main(["survey", "toy-step", "--index", index.url, "--write", *arguments])
        return status, capsys.readouterr().err, file.read_bytes().decode()

    return run


def test_a_release_that_has_the_bug_still_moves_the_range(index, write, tmp_path):
    for version in ("1.0", "1.1", "1.2"):
        index.publish(version, DEFECT)
    status, err, text = write()
    assert status == 1
    assert err == f"rlhf-patches: toy-step: >=1.0,<=1.1 became >=1.0,<=1.2 in {tmp_path / 'toy_plugin.py'}\n"
    assert text == PLUGIN.replace('">=1.0,<=1.1"', '">=1.0,<=1.2"')  # the comment, and the ends of lines, stay
    assert write(text)[::2] == (0, text)


def test_pre_releases_count(index, write):
    for version in ("1.0rc1", "1.0", "1.1"):
        index.publish(version, DEFECT)
    index.publish("1.2", FIXED)
    assert '">=1.0rc1,<1.2"' in write()[2]


def test_a_range_that_the_code_does_not_contradict_stays(index, write):
    index.publish("1.0", DEFECT)
    index.publish("1.1", DEFECT)
    index.publish("1.2", FIXED)  # which somebody has to read: the defect may be there in another shape
    assert write() == (0, "", PLUGIN)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PLUGIN.replace(">=1.0,<=1.1.", "'>=1.0,<=1.1'"), "it occurs 2 times in "),
        (PLUGIN.replace('">=1.0,<=1.1"', '">=1.0" + ",<=1.1"'), "it occurs 0 times in "),
    ],
)
def test_what_is_not_certain_is_left_to_the_author(index, write, text, why):
    for version in ("1.0", "1.1", "1.2"):
        index.publish(version, DEFECT)
    status, err, after = write(text)
    assert (status, after) == (1, text)
    assert err.startswith("rlhf-patches: toy-step: the range >=1.0,<=1.1 is not moved to >=1.0,<=1.2: ")
    assert why in err


def test_an_installed_copy_is_not_written(index, write, tmp_path):
    for version in ("1.0", "1.1", "1.2"):
        index.publish(version, DEFECT)
    status, err, text = write(folder=tmp_path / "site-packages")
    assert (status, text) == (1, PLUGIN)
    assert "is an installed copy" in err


def test_where_a_release_is_unknown_nothing_is_written(index, write):
    for version in ("1.0", "1.1", "1.3"):
        index.publish(version, DEFECT)
    index.publish("1.2", DEFECT, cut=30)
    status, err, text = write()
    assert (status, text) == (2, PLUGIN)
    assert "no range is moved, because not every release could be read" in err


def test_some_releases_tell_no_bounds(write):
    status, err, text = write(arguments=["--releases", ">=1.1"])
    assert (status, text) == (2, PLUGIN)
    assert "--write excludes --releases" in err
