"""Threads that call a function while its code is swapped; on free-threaded Pythons they run at the same time."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import Counter

import pytest

from rlhf_patches import Condition, PatchError, Replace, Rewrite, Status, Wrap, fingerprint
from rlhf_patches.engine import functions

SOURCE = "def step(a, b=2):\n    return a - b\n\ndef other(a, b=2):\n    return a - b\n"
FIXES = """\
def step(a, b=2):
    return a + b

def around(wrapped, instance, args, kwargs):
    return 2 * args[0] - wrapped(*args, **kwargs)

def large(a):
    return a / 2 if a > 4 else False
"""


@pytest.fixture
def of_kind(framework):
    """The patch of both functions, and the module's name."""
    framework.write("mod", SOURCE)
    framework.write("fixes", FIXES)

    def make(kind):
        def change(name):
            target = framework.path(f"mod:{name}")
            if kind == "rewrite":
                return Rewrite(target, "$A - b", "$A + b")
            prints = {fingerprint(SOURCE, name): "1.0"}
            if kind == "replace":
                return Replace(target, framework.path("fixes:step"), prints)
            return Wrap(target, framework.path("fixes:around"), prints)

        return framework.patch(change("step"), change("other"))

    return make


@pytest.mark.parametrize("kind", ["rewrite", "replace", "wrap"])
def test_threads_call_it_meanwhile(framework, engine, of_kind, kind):
    """Each call is the release's or the patch's as a whole, and after the swap all are the patch's."""
    made, module, ends = engine(of_kind(kind)), framework.load(), threading.Event()
    found = [Counter() for _ in range(2)]

    def call(counted):
        while not ends.is_set():
            counted[module.step(5)] += 1

    threads = [threading.Thread(target=call, args=(each,)) for each in found]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(10):
            assert made.apply().patches[0].status is Status.APPLIED
            assert module.step(5) == 7
            made.revert()
            assert module.step(5) == 3
    finally:
        ends.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert set().union(*found) <= {3, 7}
    assert all(found)


def test_the_first_time_is_noted_once(framework, engine, of_kind, monkeypatch):
    """Every call is counted, and the sizes are those of all threads."""
    condition = Condition(framework.path("mod:step"), framework.path("fixes:large"), "divisor x")
    patch = dataclasses.replace(of_kind("rewrite"), conditions=(condition,))
    made, module = engine(patch), framework.load()
    made.apply()
    first = []
    monkeypatch.setattr(made, "on_change", lambda: first.append(1))
    together = threading.Barrier(8)

    def call():
        together.wait()
        for size in range(400):
            module.step(size)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reached = made.report()[patch.name].reached
    assert (reached.calls, reached.asked, reached.held) == (3200, 3200, 8 * 395)
    assert (reached.least, reached.most) == (2.5, 199.5)
    assert first == [1]


@pytest.mark.parametrize(("stop", "gil", "status"), [(False, False, "refused"), (False, True, "applied")])
def test_before_3_14_nothing_is_changed_without_the_gil(framework, engine, of_kind, monkeypatch, stop, gil, status):
    """There a thread may be in the middle of a call while the function gets other code."""
    monkeypatch.setattr(functions, "_THREADS_STOP", stop)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: gil, raising=False)
    made, module = engine(of_kind("replace")), framework.load()
    before = module.step.__code__, module.other.__code__
    (row,) = made.apply()
    assert row.status == status
    assert ((module.step.__code__, module.other.__code__) == before) is (not gil)
    if not gil:
        assert "free-threaded Python before 3.14 cannot change a function safely; PYTHON_GIL=1 permits it" in row.reason
        with pytest.raises(PatchError, match="PYTHON_GIL=1"):
            made.apply(strict=True)


def test_3_14_stops_all_threads():
    assert functions._THREADS_STOP is (sys.version_info >= (3, 14))
