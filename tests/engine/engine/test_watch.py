"""A watch goes around whatever patches a function has, in any order, and is no reason to stop a run."""

from __future__ import annotations

import itertools
import json

import pytest

from rlhf_patches import DefinitionError, Replace, Rewrite, Status, Wrap
from rlhf_patches.definitions import pages
from rlhf_patches.definitions.guard import NEWER
from rlhf_patches.definitions.registry import Registered
from rlhf_patches.guards.fingerprints import fingerprint
from rlhf_patches.offline import evaluate
from rlhf_patches.runs import comparison

SOURCE = """\
def f(x=1):
    a = "old a"
    b = "old b"
    return a, b, x

async def waits():
    return "old"
"""
FIXES = """\
seen = []

def observed():
    return {"calls": len(seen)} if seen else {}

def around(wrapped, instance, args, kwargs):
    result = wrapped(*args, **kwargs)
    seen.append(result)
    return result

def doubled(wrapped, instance, args, kwargs):
    return wrapped(*args, **kwargs) * 2

def replaced(x=1):
    return "replaced", x
"""


@pytest.fixture
def watch(framework):
    framework.write("mod", SOURCE)
    framework.write("fixes", FIXES)
    return framework.watch(
        Wrap(
            framework.path("mod:f"), framework.path("fixes:around"), signature="(x=1)", signature_suffices="it looks on"
        ),
        name="fw-watch",
    )


def others(framework):
    """Patches of the same function: two that go together, and two that want it whole."""
    target, prints = framework.path("mod:f"), {fingerprint(SOURCE, "f"): "1.0"}
    return {
        "fw-a": framework.patch(Rewrite(target, '"old a"', '"new a"'), name="fw-a"),
        "fw-b": framework.patch(Rewrite(target, '"old b"', '"new b"'), name="fw-b"),
        "fw-replace": framework.patch(Replace(target, framework.path("fixes:replaced"), prints), name="fw-replace"),
        "fw-wrap": framework.patch(Wrap(target, framework.path("fixes:doubled"), prints), name="fw-wrap"),
    }


RESULTS = {
    (): ("old a", "old b", 1),
    ("fw-a",): ("new a", "old b", 1),
    ("fw-b",): ("old a", "new b", 1),
    ("fw-a", "fw-b"): ("new a", "new b", 1),
    ("fw-replace",): ("replaced", 1),
    ("fw-wrap",): ("old a", "old b", 1) * 2,
}


@pytest.mark.parametrize("off", [0, 1, 2])
@pytest.mark.parametrize("patches", [("fw-a", "fw-b"), ("fw-replace",), ("fw-wrap",)])
def test_it_goes_around_any_patches_in_any_order(framework, engine, watch, patches, off):
    """And the function has its own code object again at the end."""
    made = engine(watch, *(others(framework)[name] for name in patches))
    mod, fixes = framework.load(), framework.load("fixes")
    original = mod.f.__code__
    for on in itertools.permutations(("fw-watch", *patches)):
        carried = []
        for name in on:
            assert made.apply(only=name)[name].status is Status.APPLIED
            carried.append(name)
            self_check(mod, fixes, carried)
        names = list(on[off % len(on) :] + on[: off % len(on)])
        for name in names:
            made.revert(only=name)
            carried.remove(name)
            self_check(mod, fixes, carried)
        assert mod.f.__code__ is original


def self_check(mod, fixes, carried):
    del fixes.seen[:]
    expected = RESULTS[tuple(sorted(name for name in carried if name != "fw-watch"))]
    assert mod.f() == expected
    assert mod.f(x=1) == expected
    assert fixes.seen == ([expected] * 2 if "fw-watch" in carried else [])


def test_all_are_in_force_together(framework, engine, watch):
    made = engine(watch, others(framework)["fw-a"])
    framework.load().f()
    made.apply()
    assert made.in_force("fw-watch")
    assert made.in_force("fw-a")
    made.revert(only="fw-watch")
    assert not made.in_force("fw-watch")
    assert made.in_force("fw-a")


def test_two_watches_of_one_function_exclude_each_other(framework, engine, watch):
    other = framework.watch(*watch.variants[0].changes, name="fw-other")
    made = engine(watch, other)
    framework.load()
    row = made.apply()["fw-other"]
    assert row.status is Status.REFUSED
    assert "already watched by fw-watch" in row.reason
    assert not row.is_problem
    assert not row.is_there


def test_what_cannot_be_watched_ends_no_run(framework, engine, watch, caplog):
    """Not in strict mode, and the log has no warning."""
    framework.write("mod", SOURCE.replace("x=1", "x=1, y=2"))
    framework.load()
    report = engine(watch).apply(strict=True)
    row = report["fw-watch"]
    assert row.status is Status.REFUSED
    assert report.problems == ()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_it_says_what_it_has_seen(framework, engine, watch):
    made = engine(watch)
    mod = framework.load()
    made.apply()
    mod.f()
    row = made.report()["fw-watch"]
    assert row.observations == {"calls": 1}
    assert json.loads(made.report().to_json())["patches"][0]["kind"] == "watch"


def test_ranks_may_differ_in_what_they_watch(framework, engine, watch):
    made = engine(watch, others(framework)["fw-a"])
    framework.load()
    made.apply()
    assert set(comparison.effects(made)) == {"fw-a"}


def test_a_list_says_that_it_is_one(watch):
    listed = watch.listed("module:WATCH")
    assert (listed.kind, listed.name) == ("watch", "fw-watch")
    assert watch.kind == "watch"


def test_its_page_says_what_it_looks_at_and_when_it_speaks(watch):
    page = pages.page(watch)
    assert "## What it reads\n\na call\n" in page
    assert "## When it warns\n\nnone\n" in page
    assert "no collective" in page
    assert "Switch the watch off with `RLHF_PATCHES_DISABLE=fw-watch`." in page
    assert "## Watches" in pages.index([watch])


def test_it_has_wraps_alone(framework):
    with pytest.raises(DefinitionError, match=r"a change that is not a Wrap; expected only Wraps"):
        framework.watch(Rewrite(framework.path("mod:f"), "1", "2"))
    with pytest.raises(DefinitionError, match=r"observations is 'x': expected 'module:qualified.name'"):
        framework.watch(
            Wrap(framework.path("mod:f"), framework.path("fixes:around"), signature="()", signature_suffices="r"),
            observations="x",
        )


def test_newer_releases_are_watched_too(framework, engine, watch):
    framework.metadata("1.0").joinpath("METADATA").unlink()
    framework.metadata(NEWER)
    framework.load()
    assert engine(watch).apply()["fw-watch"].status is Status.APPLIED


@pytest.mark.parametrize("patch", ["fw-a", "fw-replace", "fw-wrap"])
@pytest.mark.parametrize("first", ["patch", "watch"])
def test_doctor_and_check_say_what_apply_does(framework, watch, patch, first):
    both = [Registered(others(framework)[patch], "tests"), Registered(watch, "tests")]
    other = framework.watch(*watch.variants[0].changes, name="fw-other")
    asked = [*(both if first == "patch" else both[::-1]), Registered(other, "tests")]
    rows = evaluate.inspect(asked)
    assert [rows[name].status for name in ("fw-watch", patch)] == [Status.APPLIES] * 2
    assert rows["fw-other"].status is Status.REFUSED
    assert "mod:f is already watched by fw-watch" in rows["fw-other"].reason
