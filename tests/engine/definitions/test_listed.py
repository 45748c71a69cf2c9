"""Patches that are listed, and imported only where their framework is."""

from __future__ import annotations

import re
import shutil
import sys
import types

import pytest

from rlhf_patches import DefinitionError, Listed, Rewrite, Shape, Status
from rlhf_patches.definitions import registry
from rlhf_patches.engine.engine import Engine
from rlhf_patches.patches.catalogue import LISTED


@pytest.fixture
def listed(framework, tmp_path, monkeypatch):
    """A patch of `framework` in a module of its own, as it is listed. The framework's code is not there yet."""
    module = f"patch_of_{framework.name}"
    made = framework.patch(Rewrite(framework.path("mod:f"), "return 1", "return 2"), versions="<2")
    text = f"from rlhf_patches import *\nfrom types import MappingProxyType as mappingproxy\nPATCH = {made!r}\n"
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield made.listed(f"{module}:PATCH")
    sys.modules.pop(module, None)


@pytest.fixture
def listing():
    """Makes engines that know one listed patch."""
    made = []

    def make(listed):
        made.append(Engine(load=lambda: ([(listed, "tests")], [])))
        return made[-1]

    yield make
    for each in made:
        each.revert()


def _is_imported(listed):
    return listed.path.partition(":")[0] in sys.modules


def _write(framework):
    framework.write("mod", "def f():\n    return 1\n")


def test_it_is_not_imported_where_there_is_no_framework(listing, listed):
    nowhere = listed._replace(distribution="dist-nowhere", modules=("nowhere.mod",))
    made = listing(nowhere)
    for row in (made.apply()[listed.name], made.report()[listed.name]):
        assert (row.status, row.reason) == (Status.ABSENT, "dist-nowhere is not installed")
        assert (row.distribution, row.guard, row.version) == ("dist-nowhere", "<2", None)
    assert not _is_imported(listed)
    assert [row.status for row in made.revert()] == [Status.DISABLED]


@pytest.mark.parametrize("there", ["code", "metadata", "a module without a file"])
def test_whatever_is_there_of_the_framework_has_it_imported(listing, listed, framework, monkeypatch, there):
    if there == "code":
        _write(framework)
        listed = listed._replace(distribution="dist-nowhere")
    elif there == "a module without a file":
        monkeypatch.setitem(sys.modules, "nowhere", types.ModuleType("nowhere"))
        listed = listed._replace(distribution="dist-nowhere", modules=("nowhere",))
    row = listing(listed).apply()[listed.name]
    assert _is_imported(listed)
    if there == "metadata":  # an affected version without the module
        assert row.status is Status.REFUSED


def test_it_is_one_like_others(listing, listed, framework):
    _write(framework)
    made = listing(listed)
    assert made.apply()[listed.name].status is Status.PENDING
    assert framework.load().f() == 2
    assert made.report()[listed.name].status is Status.APPLIED
    made.revert()
    assert framework.load().f() == 1


def test_a_framework_that_comes_after_apply_is_patched(listing, listed, framework):
    """A script may extend sys.path, or install something."""
    shutil.rmtree(framework.metadata("1.0"))
    made = listing(listed)
    assert made.apply()[listed.name].status is Status.ABSENT
    assert not _is_imported(listed)
    _write(framework)
    framework.metadata("1.0")
    assert framework.load().f() == 2


def test_it_is_not_imported_under_the_lock(listing, listed, framework, tmp_path, monkeypatch):
    _write(framework)
    made = listing(listed)
    held = []

    def load(self, real=Listed.load):
        held.append(made._lock._is_owned())
        return real(self)

    monkeypatch.setattr(Listed, "load", load)
    made.apply()
    assert held == [False]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"versions": "<1"}, "DefinitionError: .* is not the patch that is listed as .*; write the list anew"),
        ({"path": "no_such_module:PATCH"}, "ModuleNotFoundError: No module named 'no_such_module'"),
        ({"path": "sys:path"}, "DefinitionError: sys:path is not the patch"),
    ],
)
def test_one_that_cannot_be_imported_is_failed_and_named(listing, listed, framework, monkeypatch, wrong, said):
    _write(framework)
    wrong = listed._replace(**wrong)
    row = listing(wrong).apply()[listed.name]
    assert row.status is Status.FAILED
    assert re.match(f"{said}.*; nothing was changed", row.reason)
    assert framework.load().f() == 1
    monkeypatch.setattr(registry, "listed", lambda: ([(wrong, "a plugin")], []))
    registered, (failure,) = registry.load()
    assert registered == []
    assert re.match(f"plugin a plugin could not be used: loading '{listed.name}' raised {said}", str(failure))


def test_an_advice_is_listed_as_one(listing, framework, tmp_path, monkeypatch):
    """Where its framework is not there, it does not count among the patches."""
    made = framework.advice(Shape(framework.path("mod:f"), "return 1"), versions="<2")
    module = f"advice_on_{framework.name}"
    (tmp_path / f"{module}.py").write_text(f"from rlhf_patches import *\nADVICE = {made!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    listed = made.listed(f"{module}:ADVICE")
    nowhere = listed._replace(distribution="dist-nowhere", modules=("nowhere.mod",))
    assert str(listing(nowhere).apply()) == "dist-nowhere is not installed (plugin tests): 1 piece of advice"
    _write(framework)
    framework.load()
    assert listing(listed).apply()[listed.name].status is Status.ADVICE
    with pytest.raises(DefinitionError, match="is not the patch that is listed as"):
        listed._replace(kind="patch").load()


def test_every_built_in_patch_is_what_the_list_says():
    for listed in LISTED:
        assert listed.load().listed(listed.path) == listed
