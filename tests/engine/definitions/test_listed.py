"""Patches that are listed, and imported together with what they patch."""

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
from rlhf_patches.runs import comparison


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """Writes a patch into a module of its own, and gives its entry in a list."""
    modules = []

    def write(patch):
        modules.append(f"patch_{len(modules)}_of_{patch.name.partition('-')[0]}")
        text = f"from rlhf_patches import *\nfrom types import MappingProxyType as mappingproxy\nPATCH = {patch!r}\n"
        (tmp_path / f"{modules[-1]}.py").write_text(text)
        return patch.listed(f"{modules[-1]}:PATCH")

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def listed(framework, module_of):
    """A patch of `framework`, as it is listed. The framework's code is not there yet."""
    return module_of(framework.patch(Rewrite(framework.path("mod:f"), "return 1", "return 2"), versions="<2"))


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


def test_it_is_not_imported_where_there_is_no_framework(listing, listed, framework):
    shutil.rmtree(framework.metadata("1.0"))
    made = listing(listed)
    for row in (made.apply()[listed.name], made.report()[listed.name]):
        assert (row.status, row.reason) == (Status.ABSENT, f"{framework.distribution} is not installed")
        assert (row.distribution, row.guard, row.version) == (framework.distribution, "<2", None)
    assert not _is_imported(listed)
    assert [row.status for row in made.revert()] == [Status.DISABLED]


@pytest.mark.parametrize(
    ("versions", "there", "status"),
    [
        ("<2", "code", Status.PENDING),
        ("<2", "code without metadata", Status.PENDING),
        ("<1", "code", Status.UNAFFECTED),
        ("<2", "metadata", Status.REFUSED),
        ("<1", "metadata", Status.ABSENT),
        ("<2", "a module without a file", Status.ABSENT),
    ],
)
def test_what_its_release_tells_is_told_without_importing_it(
    listing, module_of, framework, monkeypatch, versions, there, status
):
    """In the words of the patch itself."""
    patch = framework.patch(Rewrite(framework.path("mod:f"), "return 1", "return 2"), versions=versions)
    if there.startswith("code"):
        _write(framework)
    if there in ("code without metadata", "a module without a file"):
        shutil.rmtree(framework.metadata("1.0"))
    if there == "a module without a file":
        monkeypatch.setitem(sys.modules, framework.name, types.ModuleType(framework.name))
    listed = module_of(patch)
    row = listing(listed).apply()[listed.name]
    assert row.status is status
    assert not _is_imported(listed)
    assert row == listing(patch).apply()[listed.name]


def test_it_is_imported_with_its_framework(listing, listed, framework):
    _write(framework)
    made = listing(listed)
    assert made.apply()[listed.name].status is Status.PENDING
    assert not _is_imported(listed)
    assert framework.load().f() == 2
    assert _is_imported(listed)
    assert made.report()[listed.name].status is Status.APPLIED
    made.revert()
    assert framework.load().f() == 1


def test_processes_are_compared_by_the_patch_itself(listing, listed, framework):
    """Whether it has been imported yet is no difference between two ranks."""
    _write(framework)
    made = listing(listed)
    made.apply()
    (before,) = comparison.effects(made).values()
    assert before.code is not None
    assert _is_imported(listed)


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

    def watch(owner, name):
        real = getattr(owner, name)

        def watched(*args):
            held.append((name, made._lock._is_owned()))
            return real(*args)

        monkeypatch.setattr(owner, name, watched)

    watch(Listed, "load")
    watch(Engine, "_load_what_changes")
    made.apply()
    assert held == []
    framework.load()
    assert held == [("load", False), ("_load_what_changes", False)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda it: {"variants": tuple(one._replace(independent=True) for one in it.variants)},
            "DefinitionError: .* is not the patch that is listed as .*; regenerate the list",
        ),
        (lambda it: {"path": "no_such_module:PATCH"}, "ModuleNotFoundError: No module named 'no_such_module'"),
        (lambda it: {"path": "sys:path"}, "DefinitionError: sys:path is not the patch"),
    ],
)
def test_one_that_cannot_be_imported_is_failed_and_named(listing, listed, framework, monkeypatch, wrong, said):
    _write(framework)
    wrong = listed._replace(**wrong(listed))
    made = listing(wrong)
    made.apply()
    (effect,) = comparison.effects(made).values()
    assert effect.code is None
    assert framework.load().f() == 1
    row = made.report()[listed.name]
    assert row.status is Status.FAILED
    assert re.match(f"{said}.*; nothing was changed", row.reason)
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
    (variant,) = listed.variants
    nowhere = listed._replace(variants=(variant._replace(distribution="dist-nowhere", modules=("nowhere.mod",)),))
    assert str(listing(nowhere).apply()) == "dist-nowhere is not installed (plugin tests): 1 piece of advice"
    _write(framework)
    made = listing(listed)
    assert (made.apply()[listed.name].status, _is_imported(listed)) == (Status.PENDING, False)
    framework.load()
    assert made.report()[listed.name].status is Status.ADVICE
    with pytest.raises(DefinitionError, match="is not the patch that is listed as"):
        listed._replace(variants=(variant._replace(is_advice=False),)).load()


def test_every_built_in_patch_is_what_the_list_says():
    for listed in LISTED:
        assert listed.load().listed(listed.path) == listed
