"""The forked ranks themselves (tests/harness/forkserver.py): what they owe to the tests that trust them."""

from __future__ import annotations

import os
import socket
import threading

import pytest

pytest.importorskip("torch", reason="torch is not installed here; .cache/tools/bin/nox -s frameworks runs these")

from tests.harness import forkserver_process
from tests.harness.forkserver import TORCH, Level
from tests.harness.torchrun import launch

TRIAL = "tests.harness.trial_ranks"


def folders(tmp_path, number):
    made = [tmp_path / str(one) for one in range(number)]
    for folder in made:
        folder.mkdir()
    return made


def test_every_run_is_a_fresh_fork(forkserver, tmp_path):
    """Nothing crosses from one scenario to the next, nor the generators' state from rank to rank."""
    found = [report for out in folders(tmp_path, 2) for report in forkserver.run(TRIAL, ["look"], out, TORCH)]
    assert [report["state"] for report in found] == [[0], [1]] * 2
    assert len({report["pid"] for report in found}) == 4
    assert len({report["random"] for report in found}) == 4


def test_a_signal_is_named(forkserver, tmp_path):
    with pytest.raises(RuntimeError, match="rank 1 died by SIGSEGV"):
        forkserver.run(TRIAL, ["die"], tmp_path, TORCH)


def test_a_time_out_shows_the_stack_of_every_rank(forkserver, tmp_path):
    with pytest.raises(RuntimeError, match="not done after 3 s") as caught:
        forkserver.run(TRIAL, ["hang"], tmp_path, TORCH, timeout=3)
    assert str(caught.value).count("in wait_for_ever") == 2


def test_what_cannot_be_loaded_is_an_error(forkserver, tmp_path):
    with pytest.raises(RuntimeError, match=r"No module named 'tests\.harness\.nowhere'"):
        forkserver.run(TRIAL, ["look"], tmp_path, (Level("tests.harness.nowhere:nothing"),))


def test_a_socket_has_its_name_only_once_it_listens(monkeypatch, tmp_path):
    """`serving` waits for the name and connects; a socket that has one and does not listen yet refuses."""
    address, seen = str(tmp_path / "s"), []

    class Watched(socket.socket):
        def listen(self, backlog):
            seen.append(os.path.exists(address))
            super().listen(backlog)

    monkeypatch.setattr(forkserver_process.socket, "socket", Watched)
    with forkserver_process.listen(address), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
    assert seen == [False]


def test_with_another_thread_nothing_is_forked():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert "threads" in forkserver_process.unforkable()
    finally:
        done.set()
        thread.join()


def test_where_fork_cannot_work_it_runs_cold_and_says_why(forkserver, tmp_path):
    """A level that starts a thread."""
    with pytest.warns(UserWarning, match="runs under torchrun: the fork server has 2 threads"):
        reports = forkserver.run(TRIAL, ["look"], tmp_path, (*TORCH, Level("tests.harness.loading:a_thread")))
    assert [report["state"] for report in reports] == [[0], [1]]


def test_cold_ranks_are_the_same_worker(tmp_path):
    assert [report["state"] for report in launch(TRIAL, ["look"], tmp_path)] == [[0], [1]]
