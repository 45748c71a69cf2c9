"""The three kinds of change, applied and reverted, on the plainest target."""

from __future__ import annotations

import sys

import pytest

from rlhf_patches import Replace, Rewrite, Status, Wrap
from rlhf_patches.guards import patterns
from rlhf_patches.guards.fingerprints import fingerprint

SOURCE = """\
def add(a, b=1, *, c=0):
    '''Adds.'''
    total = a - b  # the bug
    return total + c
"""


@pytest.fixture
def kinds(framework, monkeypatch):
    framework.write("mod", SOURCE)
    framework.write(
        "fixes",
        """
        def add(a, b=1, *, c=0):
            return a + b + c

        def around(wrapped, instance, args, kwargs):
            assert instance is None
            a, b = args
            return wrapped(a, -b, **kwargs)
        """,
    )
    target = framework.path("mod:add")
    return {
        "rewrite": Rewrite(target=target, pattern="$A - $B", replacement="$A + $B"),
        "replace": Replace(target, framework.path("fixes:add"), {fingerprint(SOURCE, "add"): "1.0"}),
        "wrap": Wrap(target, framework.path("fixes:around"), fingerprints={fingerprint(SOURCE, "add"): "1.0"}),
    }


@pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])
@pytest.mark.parametrize("imported_first", [True, False])
def test_applies_everywhere_and_reverts(framework, engine, kinds, kind, imported_first):
    patch = framework.patch(kinds[kind])
    made = engine(patch)
    if not imported_first:
        assert made.apply()[patch.name].status is Status.PENDING
    add = framework.load().add
    before = add.__code__
    report = made.apply()
    assert report[patch.name].status is Status.APPLIED
    assert report[patch.name].version == "1.0"
    assert (add(5, 2), add(5), add(5, c=10)) == (7, 6, 16)
    made.revert()
    assert (add(5, 2), add(5), add(5, c=10)) == (3, 4, 14)
    if imported_first:
        assert add.__code__ is before
    assert made.report()[patch.name].status is Status.DISABLED


def test_listing_patches_imports_no_implementation(framework, engine, kinds):
    made = engine(framework.patch(kinds["replace"]))
    made.apply()
    assert framework.path("fixes") not in sys.modules


def test_no_test_of_ours_can_wait_for_ever(pytestconfig):
    assert float(pytestconfig.getini("faulthandler_timeout")) > 0
    assert pytestconfig.getini("faulthandler_exit_on_timeout")


def test_where_ast_grep_cannot_be_imported_wraps_and_replacements_do_not_care(framework, engine, monkeypatch):
    text = "def f(): return 'old'\n"
    framework.write("mod", text)
    framework.write("fix", "def f(): return 'new'\n")
    monkeypatch.setattr(patterns, "_without_ast_grep", "it cannot be imported")
    made = engine(
        framework.patch(Replace(framework.path("mod:f"), framework.path("fix:f"), {fingerprint(text, "f"): "1.0"}))
    )
    assert [row.status for row in made.apply()] == [Status.PENDING]
    assert framework.load().f() == "new"
