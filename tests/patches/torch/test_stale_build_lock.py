"""``torch-stale-build-lock``: who waits for a builder that is gone builds in its place, and nobody else does.

stale_build_lock_ranks.py builds and loads an extension with real torch, ninja and compiler, and kills builders.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import sys
import threading
import time

import pytest

from rlhf_patches.patches.torch import _build_lock
from tests.harness.forkserver import TORCH
from tests.harness.logs import diagnosed

RULE_COVERAGE = {
    "minimal scope": ("test_who_makes_the_file_signs_it_and_builds", "test_on_other_systems_all_is_as_released"),
    "no side effects": (
        "because the baton is one of _jit_compile's own, and gets a descriptor as try_acquire gives it one"
    ),
    "backward compatible": (
        "test_a_build_that_fails_fails_as_released",
        "test_what_cannot_be_told_is_waited_for",
        "test_a_folder_that_cannot_be_written_to_raises_as_released",
        "test_others_may_open_the_file_meanwhile",
    ),
    "no new blocking": (
        "test_a_living_builder_is_waited_for_by_all",
        "test_what_cannot_be_told_is_waited_for",
        "test_a_builder_that_is_just_done_is_not_gone",
    ),
    "the process waits as before": "test_a_living_builder_is_waited_for_by_all",
    "has the same meaning as before": ("test_a_living_builder_is_waited_for_by_all", "test_a_killed_build"),
    "everything is as released": "test_on_other_systems_all_is_as_released",
    "only if nobody else has it open": "test_others_may_open_the_file_meanwhile",
    "on file systems of one machine only": "test_file_systems_that_machines_share",
}
WORKER = "tests.patches.torch.stale_build_lock_ranks"
CASES = ("killed", "living", "orphans", "several", "killed_with_the_patch", "elsewhere", "recycled", "raising", "again")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere everything is as released")
with_a_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler (apt install g++)")
GONE = "is gone, so this process builds"


@pytest.fixture
def found(run_ranks):
    """What the worker has seen, by case."""
    reports = run_ranks(WORKER, *CASES, "newer", "opened", levels=TORCH, ranks=6)
    assert {(one["version"], one["status"]) for one in reports} == {("2.13.0+cpu", "applied")}
    return {case: seen for one in reports for case, seen in one.items() if case not in ("version", "status")}


def is_built(result, *lines):
    """By that process, or by another; each of these is in one of the lines it has logged, the last in the last."""
    assert (result.get("answer"), result.get("lock")) == (42, False), result
    assert not lines or lines[-1] in result["lines"][-1]
    assert all(any(line in said for said in result["lines"]) for line in lines), result["lines"]
    assert all("/extensions/tiny/lock, lock file of a build: " in said for said in result["lines"])


@with_a_compiler
def test_a_killed_build(found):
    for case, signed in (("killed", False), ("killed_with_the_patch", True)):
        seen = found[case]
        assert seen["left"]["built"] is False, "it was killed in the middle"
        assert bool(seen["left"]["lock"]) is signed
        assert seen["without"] == {"waits": True}
        is_built(seen["with"], GONE)
        assert len(seen["with"]["lines"]) == 1


@with_a_compiler
def test_of_several_that_wait_one_builds(found):
    for result in found["several"]["results"]:
        is_built(result)
    assert found["several"]["compilations"] == 1
    assert sum(GONE in line for result in found["several"]["results"] for line in result["lines"]) == 1


@with_a_compiler
def test_a_living_builder_is_waited_for_by_all(found):
    for patched, seen in found["living"].items():
        assert seen["ended"] == [False, False], "with the patch and without it"
        builder, waiting, released = seen["results"]
        is_built(waiting, " is building; if no build is under way anywhere, delete it")
        assert all(("the process that made it" in line) is (patched == "False") for line in waiting["lines"])
        assert not any(GONE in line for line in waiting["lines"])
        for result in (builder, released):
            is_built(result)
            assert result["lines"] == []
        assert seen["compilations"] == 1


@with_a_compiler
def test_compilers_that_outlive_their_builder_are_waited_for(found):
    for seen in found["orphans"].values():
        assert not seen["ended"]
        is_built(seen["result"], "still works in the folder, although the builder is gone", GONE)


@with_a_compiler
def test_a_builder_on_another_machine_lives(found):
    seen = found["elsewhere"]
    assert seen["waits"]
    assert all("of 'another-host' may be building on another machine" in line for line in seen["shared"]["lines"])
    assert seen["shared"]["lines"]
    assert "Could not load this library" in seen["shared"]["error"], "the lock was removed by hand; it has not built"
    is_built(seen["own"], GONE)


@with_a_compiler
def test_another_process_may_have_the_number_of_a_dead_one(found):
    is_built(found["recycled"]["with"], GONE)


@with_a_compiler
def test_a_build_that_fails_fails_as_released(found):
    assert found["raising"]["True"] == found["raising"]["False"] == ["RuntimeError", "OSError", False]


@with_a_compiler
def test_what_was_loaded_before_is_not_built_again(found):
    is_built(found["again"]["with"], GONE)
    assert found["again"]["compilations"] == 1


@with_a_compiler
def test_beside_torch_2_14(found):
    seen = found["newer"]
    assert seen["left"] == "", "its lock is there after its build"
    assert not seen["ended"], "while it builds"
    is_built(seen["with"], GONE)
    assert seen["without"] == {"waits": True}


def test_others_may_open_the_file_meanwhile(found):
    """The kernel's signal then, SIGIO, would end a process."""
    assert 0 < found["opened"]["alive"] <= found["opened"]["of"]


# ------------------------------------------------------------------------------------- with torch's FileBaton alone


@pytest.fixture
def baton(tmp_path):
    """One of torch's own, loaded without torch."""
    place = importlib.metadata.distribution("torch").locate_file("torch/utils/file_baton.py")
    spec = importlib.util.spec_from_file_location("file_baton", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FileBaton(str(tmp_path / "lock"), wait_seconds=0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(_build_lock, "TELL_SECONDS", 0.1)
    monkeypatch.setattr(_build_lock, "LOOK_SECONDS", 0.05)


@pytest.fixture
def waits(baton, caplog):
    """Whether a baton is waited for; its file is removed in the end. Returns the lines that were logged meanwhile."""

    def waits():
        before = os.stat(baton.lock_file_path)
        remover = threading.Timer(0.5, os.remove, [baton.lock_file_path])
        remover.start()
        caplog.clear()
        baton.fd = None
        assert _build_lock.acquired(baton) is False
        remover.join(timeout=10)
        assert baton.fd is None
        assert before.st_size == 0, "it is not signed"
        lines = [record.getMessage() for record in caplog.records]
        assert lines
        assert all(line.startswith(baton.lock_file_path) and line.endswith("delete it") for line in lines)
        return lines

    return waits


def stale(baton, text=""):
    """A lock file that nobody has."""
    with open(baton.lock_file_path, "x", encoding="utf-8") as file:
        file.write(text)


def owner(**more):
    boot, namespace = _build_lock._boot(), os.stat("/proc/self/ns/pid").st_ino
    return json.dumps({"boot": boot, "namespace": namespace, "host": "a-host", "pid": 7, **more})


def test_who_makes_the_file_signs_it_and_builds(baton, caplog):
    assert _build_lock.acquired(baton) is True
    with open(baton.lock_file_path, encoding="utf-8") as file:
        said = json.load(file)
    assert said == {**json.loads(owner()), "host": socket.gethostname(), "pid": os.getpid()}
    assert not os.get_inheritable(baton.fd)
    assert _build_lock._look(baton.lock_file_path, ()).alive.endswith(" is building"), "it holds its flock"
    baton.release()
    assert not os.path.exists(baton.lock_file_path)
    assert caplog.records == []


def test_a_lock_that_is_nobodys_is_taken_over_in_place(baton):
    stale(baton)
    before = os.stat(baton.lock_file_path)
    assert _build_lock.acquired(baton) is True
    assert os.path.samestat(before, os.stat(baton.lock_file_path))
    with open(baton.lock_file_path, encoding="utf-8") as file:
        assert json.load(file)["pid"] == os.getpid()
    baton.release()
    assert not os.path.exists(baton.lock_file_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"boot": 1}', "\0" * 5000, "\udcff"])
def test_what_does_not_say_whose_it_is(baton, text):
    with open(baton.lock_file_path, "x", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    assert _build_lock.acquired(baton) is True
    baton.release()


def test_a_builder_that_is_just_done_is_not_gone(baton, monkeypatch):
    """Upstream closes the file, then removes it: it was there in one look, and is not in the next."""
    stale(baton)
    look = _build_lock._look

    def once(path, gone):
        seen = look(path, gone)
        assert not seen.alive
        os.remove(path)
        return seen

    monkeypatch.setattr(_build_lock, "_look", once)
    assert _build_lock.acquired(baton) is False


def test_another_file_in_its_place_is_looked_at_anew(baton, monkeypatch):
    stale(baton)
    files = []

    def replaced(path, gone):
        seen = look(path, gone)
        if len(files) < 3:
            os.remove(path)
            time.sleep(0.02)
            stale(baton)
        files.append((seen.file, seen.fd))
        return seen

    look = _build_lock._look
    monkeypatch.setattr(_build_lock, "_look", replaced)
    assert _build_lock.acquired(baton) is True
    baton.release()
    assert len(files) == 5
    assert [fd for _, fd in files[:4]] == [None] * 4


def refuses(number):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EINVAL, errno.EACCES])
@pytest.mark.parametrize("call", ["fcntl", "flock"])
def test_what_cannot_be_told_is_waited_for(baton, waits, monkeypatch, call, number):
    monkeypatch.setattr(fcntl, call, refuses(number))
    stale(baton)
    assert all("cannot determine whether its builder is alive" in line for line in waits())


def test_without_a_flock_the_file_is_as_released(baton, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuses(errno.ENOLCK))
    assert _build_lock.acquired(baton) is True
    assert os.stat(baton.lock_file_path).st_size == 0
    baton.release()


@pytest.mark.parametrize("name", ["_boot", "_mount", "_working_in"])
def test_without_proc(baton, waits, monkeypatch, name):
    monkeypatch.setattr(_build_lock, name, refuses(errno.ENOENT))
    stale(baton)
    if name == "_boot":  # of an empty file nobody asks for it, until it is to be signed
        assert any("cannot determine whether" in line for line in waits())
    else:
        assert all("cannot determine whether" in line for line in waits())


def test_file_systems_that_machines_share(baton, waits, monkeypatch):
    monkeypatch.setattr(_build_lock, "_mount", lambda fd: ("nfs4", False))
    stale(baton)
    assert all("may be building on another machine, since nfs4 may be shared" in line for line in waits())
    stale(baton, owner())
    assert _build_lock.acquired(baton) is True, "of this machine, in this boot"
    baton.release()


def test_containers(baton, waits, monkeypatch):
    monkeypatch.setattr(_build_lock, "FIRST_NAMESPACE", 0)
    stale(baton)
    assert all("its compilers may still be running in another container" in line for line in waits())
    for text in (owner(), owner(namespace=1, boot="another")):
        stale(baton, text)
        assert _build_lock.acquired(baton) is True
        baton.release()
    monkeypatch.setattr(_build_lock, "_mount", lambda fd: ("overlay", True))
    stale(baton)
    assert _build_lock.acquired(baton) is True, "this container's own"
    baton.release()
    monkeypatch.setattr(_build_lock, "_mount", lambda fd: ("overlay", False))
    stale(baton)
    assert waits()


def test_another_users_file(baton, waits, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    stale(baton)
    assert all("the file belongs to another user" in line for line in waits())


def test_a_link(baton, waits, tmp_path):
    (tmp_path / "elsewhere").touch()
    os.symlink(tmp_path / "elsewhere", baton.lock_file_path)
    assert waits()


def test_a_folder_that_cannot_be_written_to_raises_as_released(baton, tmp_path):
    baton.lock_file_path = str(tmp_path / "none" / "lock")
    with pytest.raises(FileNotFoundError):
        _build_lock.acquired(baton)


def test_on_other_systems_all_is_as_released(baton, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert _build_lock.acquired(baton) is True
    assert os.stat(baton.lock_file_path).st_size == 0
    baton.release()
    stale(baton)
    assert _build_lock.acquired(baton) is False, "at once: upstream's wait() is next"


def test_diagnose():
    """py-spy's stack of a process that waits for another's build; one that builds is at work."""
    wait = "    wait (torch/utils/file_baton.py:51)\n"
    stack = f"""\
Thread 4242 (idle): "MainThread"
{wait}    _jit_compile (torch/utils/cpp_extension.py:2400)
    load (torch/utils/cpp_extension.py:1929)
    jit_load (deepspeed/ops/op_builder/builder.py:585)
"""
    assert diagnosed(stack) == [("torch-stale-build-lock", False)]
    assert diagnosed(stack.replace(wait, "    run (subprocess.py:550)\n")) == []
