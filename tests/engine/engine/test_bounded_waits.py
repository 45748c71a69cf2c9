"""No lock of ours is waited for without end: whatever another thread does, an import of a framework goes on."""

from __future__ import annotations

import threading

import pytest

from rlhf_patches import Rewrite, Status
from rlhf_patches.engine import locks
from rlhf_patches.runs import report_file


@pytest.fixture
def patches(framework, monkeypatch):
    monkeypatch.setattr(locks, "TIMEOUT", 0.2)
    for name in ("m", "n", "o"):
        framework.write(name, "def f(a, b):\n    return a - b\n")
    names = [framework.path(f"{name}:f") for name in ("m", "n", "o")]
    return [framework.patch(Rewrite(path, "$A - $B", "$A + $B")) for path in names]


class Held:
    """A lock in the hands of another thread."""

    def __init__(self, lock):
        self.lock, self.taken, self.enough = lock, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold)

    def hold(self):
        with self.lock:
            self.taken.set()
            self.enough.wait(60)

    def __enter__(self):
        self.thread.start()
        assert self.taken.wait(60)

    def __exit__(self, *_):
        self.enough.set()
        self.thread.join(60)


def test_an_import_goes_on_where_another_thread_holds_the_engines_lock(framework, engine, patches):
    import dataclasses

    made = engine(*(dataclasses.replace(patch, name=f"{patch.name}-{i}") for i, patch in enumerate(patches)))
    made.apply()
    with Held(made._lock):
        assert framework.load("m").f(5, 2) == 3, "unpatched, and not waited for without end"
        with pytest.raises(RuntimeError, match=r"another thread has been changing functions for 0 s"):
            made.report()
    assert [row.status for row in made.report()] == [Status.FAILED, Status.PENDING, Status.PENDING]
    assert "another thread has been changing functions" in made.report().patches[0].reason
    assert framework.load("n").f(5, 2) == 7, "what can be had again is waited for again"
    made.apply()
    assert framework.load("m").f(5, 2) == 7


def test_a_plugin_that_never_comes_to_an_end(framework, engine, patches):
    made = engine(patches[0])
    with Held(made._loading), pytest.raises(RuntimeError, match=r"another thread has been loading the patches for 0 s"):
        made.apply()
    assert made.apply()


def test_a_report_that_another_thread_writes_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(report_file, "_TIMEOUT", 0.2)
    called = []
    line = report_file._Line(str(tmp_path / "report.jsonl"), lambda: called.append(1))
    with Held(line._lock):
        line.update()
    assert called == []
