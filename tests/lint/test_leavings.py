"""What a session of nox has left behind is seen: folders, and processes, which are ended."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools import leavings


@pytest.fixture
def folder():
    made = leavings.make()
    yield made
    leavings.remove(made)
    assert not made.exists()


def test_folders_and_files(folder):
    assert leavings.left(folder) == []
    for name in ("tmpabcdefgh", "rlhf-patches-run-abcdefgh", "pytest-of-root"):
        (folder / name).mkdir()
    assert leavings.left(folder) == ["rlhf-patches-run-abcdefgh", "tmpabcdefgh"]
    assert [name for name in leavings.left(folder) if leavings.is_ours(name)] == ["rlhf-patches-run-abcdefgh"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read in /proc")
def test_a_process_is_named_and_ended(folder, monkeypatch):
    monkeypatch.setattr(leavings, "_SECONDS", 0.2)
    assert leavings.end_processes(folder) == []
    sleeper = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    with subprocess.Popen(
        sleeper, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.PIPE, start_new_session=True
    ) as started:
        assert started.stdout.readline()
        assert list(leavings.processes(folder)) == [started.pid]
        (command,) = leavings.end_processes(folder)
        assert "time.sleep(600)" in command
        assert started.wait(60) == -9
    assert leavings.processes(folder) == {}
