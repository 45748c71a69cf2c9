"""One patch on and off by itself, for a test: `rlhf_patches.testing.in_process`. All else stays as it was."""

from __future__ import annotations

import dataclasses
import os

import pytest

from rlhf_patches import Rewrite, SettingsError, Status, Variant
from rlhf_patches.testing import checks, in_process
from rlhf_patches.testing.in_process import applied

TEXT = "def f(x):\n    a = x - 1\n    b = x * 2\n    return a, b\n"


class Two:
    """Two patches of the function ``f``, of which the first is registered and applied."""

    def __init__(self, framework, engine):
        framework.write("mod", TEXT)
        target = framework.path("mod:f")
        self.first = framework.patch(Rewrite(target, "x - 1", "x + 1"), name="toy-first")
        self.second = framework.patch(Rewrite(target, "x * 2", "x * 3"), name="toy-second")
        self.engine = engine(self.first)
        self.f = framework.load().f
        self.engine.apply()
        assert self.f(5) == (6, 10)
        self.rows = list(self.engine.report())


@pytest.fixture
def two(framework, engine, monkeypatch):
    made = Two(framework, engine)
    monkeypatch.setattr(in_process, "engine", made.engine)
    yield made
    assert made.f(5) == (6, 10)
    assert list(made.engine.report()) == made.rows


def test_beside_another_patch_of_the_same_function(two):
    with applied(two.second) as row:
        assert (row.name, row.status) == ("toy-second", Status.APPLIED)
        assert two.f(5) == (6, 15)
    assert two.f(5) == (6, 10)


def test_one_that_is_applied_already_is_off_and_on_and_then_as_it_was(two):
    with two.engine.set_apart(two.first):
        assert two.f(5) == (4, 10)
    assert two.f(5) == (6, 10)
    with applied("toy-first"):
        assert two.f(5) == (6, 10)


def test_one_that_apply_was_not_asked_for_is_as_it_was(framework, engine, monkeypatch):
    framework.write("mod", TEXT)
    patch = framework.patch(Rewrite(framework.path("mod:f"), "x - 1", "x + 1"))
    made = engine(patch)
    monkeypatch.setattr(in_process, "engine", made)
    before = made.report()
    assert before[patch.name].status is Status.INACTIVE
    with applied(patch.name):
        assert framework.load().f(5) == (6, 10)
    assert framework.load().f(5) == (4, 10)
    assert made.report() == before
    assert made.asked().chosen is None


def test_its_life_leaves_what_was_applied_applied(two, monkeypatch):
    monkeypatch.setenv("RLHF_PATCHES_ONLY", "toy-first")
    found = in_process.life(two.first, two.first.variants[0])
    checks.lives_as_it_should(two.first, found)
    assert [found[what]["own code"] for what in ("applied", "reverted", "disabled")] == [[False], [True], [True]]
    assert os.environ["RLHF_PATCHES_ONLY"] == "toy-first"
    assert "RLHF_PATCHES_DISABLE" not in os.environ


def test_two_definitions_of_one_name_are_an_error(two):
    other = dataclasses.replace(two.second, name="toy-first")
    with pytest.raises(SettingsError, match="tests registers Patch toy-first with a different definition"):
        applied(other).__enter__()
    with pytest.raises(SettingsError, match="'toy-third', which is not a patch"):
        applied("toy-third").__enter__()


def test_neither_strict_mode_nor_the_log_takes_notice(two, monkeypatch, caplog):
    monkeypatch.setenv("RLHF_PATCHES_STRICT", "1")
    (variant,) = two.second.variants
    changes = (dataclasses.replace(variant.changes[0], pattern="x / 2"),)
    wrong = dataclasses.replace(two.second, variants=(Variant(variant.guard, changes),))
    with pytest.raises(AssertionError, match="toy-second is refused instead of applied"):
        applied(wrong).__enter__()
    assert caplog.text == ""


def test_code_that_was_changed_meanwhile_is_an_error(framework, engine, monkeypatch):
    framework.write("mod", TEXT)
    patch = framework.patch(Rewrite(framework.path("mod:f"), "x - 1", "x + 1"))
    monkeypatch.setattr(in_process, "engine", engine())
    f = framework.load().f
    said = f"was not reverted: .*other code has changed {framework.name}.mod:f"
    with pytest.raises(AssertionError, match=said), applied(patch):
        f.__code__ = (lambda x: x).__code__


@pytest.mark.parametrize("independent", [True, False])
def test_of_an_independent_variant_one_module_that_can_be_imported_is_enough(
    framework, engine, monkeypatch, independent
):
    framework.write("mod", TEXT)
    framework.write("gpu", f"import no_such_driver\n{TEXT}")
    changes = tuple(Rewrite(framework.path(f"{name}:f"), "x - 1", "x + 1") for name in ("gpu", "mod"))
    patch = framework.patch(*changes)
    variant = dataclasses.replace(patch.variants[0], independent=independent)
    patch = dataclasses.replace(patch, variants=(variant,))
    monkeypatch.setattr(in_process, "engine", engine())
    if independent:
        with applied(patch):
            assert framework.load().f(5) == (6, 10)
        assert framework.load().f(5) == (4, 10)
    else:
        with pytest.raises(ImportError, match="no_such_driver"):
            applied(patch).__enter__()
