"""Patches that upstream contests are off unless they are asked for by their names."""

from __future__ import annotations

import dataclasses

import pytest

from rlhf_patches import Rewrite, SettingsError, Status, settings
from rlhf_patches.cli import catalogue
from rlhf_patches.definitions import pages, registry
from rlhf_patches.definitions.errors import DefinitionError
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.engine.engine import engine as the_engine
from rlhf_patches.ray import runtime_env
from rlhf_patches.testing import applied

WHY = "the method's authors hold that it is right"
ENABLE, ONLY, DISABLE = "RLHF_PATCHES_ENABLE", "RLHF_PATCHES_ONLY", "RLHF_PATCHES_DISABLE"
BUILT_IN = "verl-gdpo-whitening"


@pytest.fixture
def contested(framework):
    framework.write("m", "def f(a, b):\n    return a - b\n")
    patch = framework.patch(Rewrite(framework.path("m:f"), "$A - $B", "$A + $B"))
    return dataclasses.replace(patch, contested=WHY)


@pytest.fixture
def other(framework, contested):
    framework.write("n", "def g(a, b):\n    return a - b\n")
    return dataclasses.replace(
        framework.patch(Rewrite(framework.path("n:g"), "$A - $B", "$A + $B")), name=contested.name + "-too"
    )


def test_it_is_off_and_says_how_to_have_it(framework, engine, contested, other):
    made = engine(contested, other)
    row = made.apply()[contested.name]
    module, beside = framework.load("m"), framework.load("n")
    assert (module.f(5, 2), beside.g(5, 2)) == (3, 7)
    row = made.report()[contested.name]
    assert (row.status, row.reason) == (
        Status.DISABLED,
        f"off by default (RLHF_PATCHES_ENABLE={contested.name} enables it): {WHY}",
    )
    assert not row.status.is_problem


@pytest.mark.parametrize("imported", ["first", "last"])
@pytest.mark.parametrize(
    ("variables", "only", "applied"),
    [
        ({}, None, False),
        ({}, ["*"], False),
        ({}, "{glob}", False),
        ({}, "{name}", True),
        ({}, ["nothing-*", "{name}"], None),
        ({ENABLE: "{name}"}, None, True),
        ({ENABLE: " {name} ,"}, ["*"], True),
        ({ONLY: "{name}"}, None, True),
        ({ONLY: "{glob}"}, None, False),
        ({ONLY: "*"}, None, False),
        ({ONLY: "{glob},{name}"}, None, True),
        ({ENABLE: "{name}", DISABLE: "{name}"}, None, False),
        ({ENABLE: "{name}", ONLY: "{name}-too"}, None, False),
        ({ONLY: "{name}-too"}, "{name}", False),
    ],
)
def test_what_asks_for_it(framework, engine, contested, other, monkeypatch, variables, only, applied, imported):
    names = {"name": contested.name, "glob": contested.name[:-1] + "?"}
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.format(**names))
    only = [each.format(**names) for each in only] if isinstance(only, list) else only and only.format(**names)
    made = engine(contested, other)
    if imported == "first":
        framework.load("m")
    if applied is None:
        with pytest.raises(SettingsError, match="is not a patch"):
            made.apply(only)
        return
    made.apply(iter(only) if isinstance(only, list) else only)
    assert framework.load("m").f(5, 2) == (7 if applied else 3)
    status = made.report()[contested.name].status
    assert status is (Status.APPLIED if applied else Status.DISABLED)


def test_asked_for_stays_asked_for_until_it_is_reverted(framework, engine, contested):
    made = engine(contested)
    module = framework.load("m")
    made.apply(contested.name)
    made.apply()
    assert module.f(5, 2) == 7
    made.revert()
    made.apply()
    assert module.f(5, 2) == 3


def test_a_variable_that_goes_takes_it_off(framework, engine, contested, monkeypatch):
    made, module = engine(contested), framework.load("m")
    monkeypatch.setenv(ENABLE, contested.name)
    made.apply()
    assert module.f(5, 2) == 7
    monkeypatch.delenv(ENABLE)
    made.apply()
    assert module.f(5, 2) == 3


def test_strict_mode_takes_no_offence(framework, engine, contested):
    framework.write("m", "def f(a, b):\n    return a * b\n")
    framework.metadata("1.0")
    framework.load("m")
    assert engine(contested).apply(strict=True)[contested.name].status is Status.DISABLED


def test_a_test_asks_for_it_by_nature(framework, contested):
    module = framework.load("m")
    with applied(contested):
        assert module.f(5, 2) == 7
    assert module.f(5, 2) == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("some-patc", "RLHF_PATCHES_ENABLE names 'some-patc', which is not a patch; did you mean 'some-patch'?"),
        ("some-*", "RLHF_PATCHES_ENABLE names 'some-*', a glob: expected names"),
        ("*", "RLHF_PATCHES_ENABLE names '*', a glob: expected names"),
    ],
)
def test_a_wrong_name_is_an_error(value, message):
    with pytest.raises(SettingsError) as error:
        settings.from_environment(["some-patch"], environment={ENABLE: value})
    assert str(error.value) == message


@pytest.mark.parametrize("text", ["two\nlines", " blank "])
def test_its_text_is_one_line(contested, text):
    with pytest.raises(DefinitionError, match=r"contested is .*; expected one line, or nothing"):
        dataclasses.replace(contested, contested=text)


def test_the_page_and_the_list(contested, monkeypatch, capsys):
    page = pages.page(contested)
    off = "The patch is **off by default**"
    assert f"## Contested upstream\n\n{WHY[0].upper()}{WHY[1:]}. {off}" in " ".join(page.split(" "))
    assert f"Switch the patch on with `RLHF_PATCHES_ENABLE={contested.name}`." in page
    assert "Switch it off" not in page
    assert pages.summary(contested).endswith("(off by default)")
    assert "Contested" not in pages.page(dataclasses.replace(contested, contested=""))
    monkeypatch.setattr(registry, "load", lambda: ([Registered(contested, "tests")], []))
    catalogue._explain(type("Options", (), {"words": [contested.name]}))
    assert "## Contested upstream" in capsys.readouterr().out


def test_the_list_of_patches_knows_it_without_an_import(contested):
    assert contested.listed("m:PATCH").contested == WHY
    (entry,) = [patch for patch, _ in registry.listed()[0] if patch.name == BUILT_IN]
    assert entry.contested
    assert entry.contested == entry.load().contested


# ------------------------------------------------------------------------------- the built-in one, in Ray's workers


def in_workers():
    """Whether workers that get the environment of this process apply it."""
    found = runtime_env()["env_vars"]
    names = [patch.name for patch, _ in registry.listed()[0]]
    there = settings.from_environment(names, environment=found)
    return not (there.switched_off(BUILT_IN) or there.unasked(BUILT_IN, "why"))


@pytest.fixture
def afterwards():
    yield
    the_engine.revert()


def test_workers_do_as_the_driver(monkeypatch, afterwards, quiet):
    assert not in_workers()
    monkeypatch.setenv(ENABLE, BUILT_IN)
    assert in_workers()
    the_engine.apply(only="trl-*")
    assert not in_workers()
    monkeypatch.delenv(ENABLE)
    the_engine.apply(only=BUILT_IN)
    assert in_workers()
    the_engine.apply()
    assert in_workers(), "it is asked for still"
    the_engine.revert()
    the_engine.apply()
    assert not in_workers()
