"""RLHF_PATCHES_REPORT: one line per process, whatever becomes of the process, the disk, and the file."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlhf_patches import PatchReport, Report, Status
from rlhf_patches.cli import run as run_command
from rlhf_patches.definitions.registry import PluginFailure
from rlhf_patches.runs import report_file, report_reader
from tests.harness.report_lines import PROBLEM, read

# ------------------------------------------------------------------------------------------ the file


def _report(reason="", status=Status.APPLIED):
    return Report((PatchReport("a-bug", status, reason, "dist", "1.0", "", "tests"),))


@pytest.fixture
def said():
    """What the lines made by ``line`` will say."""
    return [_report("first")]


@pytest.fixture
def line(file, said):
    return report_file._Line(str(file), lambda: said[0])


def reasons(file):
    return [found["patches"][0]["reason"] for found in read(file)]


def test_nothing_is_written_without_news(file, line, said):
    line.update()
    before = file.read_bytes()
    os.utime(file, (0, 0))
    line.update()
    assert (file.read_bytes(), file.stat().st_mtime) == (before, 0)
    said[0] = _report("second")
    line.update()
    assert (reasons(file), len(file.read_bytes())) == (["second"], len(before))
    assert len(before) % 4096 == 0


NAME = "from rlhf_patches.runs import report_file; print(report_file._name())"
OF_A_CHILD = """
import multiprocessing
from rlhf_patches.runs import report_file

def say():
    print(report_file._name(), flush=True)

for name in (None, "EngineCore_DP0", "two words"):
    child = multiprocessing.get_context("fork").Process(target=say, name=name)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("title", "name"),
    [
        (b"VLLM::EngineCore\0\0\0", "VLLM::EngineCore"),  # as setproctitle leaves it
        (b"VLLM::Worker_TP0", "VLLM::Worker_TP0"),
        (b"sglang::scheduler_TP1\0", "sglang::scheduler_TP1"),
        (b"ray::Actor.method() --key=secret", "ray::Actor.method"),
        (b"python\0-c\0print('a::b')\0", None),
        (b"", None),
    ],
)
def test_an_engine_s_process_is_called_what_it_calls_itself(tmp_path, title, name):
    """tests/patches/trl_on_vllm/test_engine_processes.py asks real vLLM's."""
    (tmp_path / "cmdline").write_bytes(title)
    assert report_file._name(str(tmp_path / "cmdline")) == name
    assert report_file._name(str(tmp_path / "none")) is None


def test_others_have_no_name_but_what_was_given_them():
    assert subprocess.check_output([sys.executable, "-c", NAME], text=True).strip() == "None"
    said = subprocess.check_output([sys.executable, "-c", OF_A_CHILD], text=True).split("\n")
    assert said == ["None", "EngineCore_DP0", "None", ""]


@pytest.mark.parametrize(
    ("report", "written"),
    [
        (_report(status=Status.PENDING), False),
        (_report(status=Status.ABSENT), False),
        (_report(status=Status.DISABLED), False),
        (_report(status=Status.UNAFFECTED), True),
        (_report(status=Status.REFUSED), True),
        (_report(status=Status.FAILED), True),
        (Report((), (PluginFailure("plug", "broken"),)), True),
    ],
)
def test_what_is_worth_a_line_before_the_end(file, line, said, report, written):
    said[0] = report
    line.update()
    assert file.exists() is written
    line.end()
    (found,) = read(file)
    assert found["ended"] == "exit"


def test_what_a_patch_says_of_itself_need_not_be_plain(file, line, said):
    (row,) = said[0]
    said[0] = Report((dataclasses.replace(row, observations={"where": Path("here")}),))
    line.update()
    (found,) = read(file)
    assert found["patches"][0]["observations"] == {"where": "here"}


def test_a_line_that_outgrows_its_room_moves(file, line, said):
    other = report_file._Line(str(file), lambda: _report("other"))
    line.update()
    other.update()
    said[0] = _report("long " * 5000)
    line.update()
    assert reasons(file) == ["other", "long " * 5000]
    assert file.read_bytes().startswith(b" " * 4095 + b"\n")
    said[0] = _report("short")
    line.end()
    assert reasons(file) == ["other", "short"]


THEIRS = b'{"host": "else", "pid": 1, "rank": null}\n' * 1000


def _remove(file):
    file.unlink()


def _empty(file):
    os.truncate(file, 0)


def _replace(file):
    """By another of the same length or more, as a copy of it would be."""
    file.unlink()
    file.write_bytes(THEIRS)


def _empty_and_refill(file):
    """The same file with the same inode and other content."""
    with open(file, "r+b") as opened:
        opened.truncate(0)
        opened.write(THEIRS)


@pytest.mark.parametrize("happening", [_remove, _empty, _replace, _empty_and_refill])
def test_a_file_that_is_another_meanwhile_gets_a_whole_line(file, line, said, happening):
    other = report_file._Line(str(file), lambda: _report("other"))
    other.update()
    line.update()
    happening(file)
    theirs = file.read_bytes() if file.exists() else b""
    said[0] = _report("second")
    line.end()
    data = file.read_bytes()
    assert data.startswith(theirs)
    assert len(data) == len(theirs) + 4096
    assert read(file)[-1]["patches"][0]["reason"] == "second"


def test_a_torn_line_does_not_swallow_the_next(file, line, said):
    file.write_bytes(b'{"host": "somebody who was killed in the mid')
    line.update()
    said[0] = _report("second")
    line.update()
    _, ours = file.read_bytes().splitlines()
    assert json.loads(ours)["patches"][0]["reason"] == "second"
    summary = report_reader.summarize([str(file)])
    assert (len(summary.processes), len(summary.unreadable)) == (1, 1)


def test_threads(file, line, said):
    numbers = iter(range(10_000))
    line._report = lambda: _report(f"number {next(numbers)}")
    threads = [threading.Thread(target=lambda: [line.update() for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reasons(file) == [f"number {8 * 20 - 1}"]


def test_a_lock_that_somebody_keeps_is_not_waited_for_long(file, line, monkeypatch):
    monkeypatch.setattr(report_file, "_timeout", 0.05)
    file.touch()
    with open(file, "rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        line.update()
        line.end()
        assert report_file._timeout == 0, "the second time there is no wait"
    (found,) = read(file)
    assert found["ended"] == "exit"


@pytest.mark.parametrize("failing", [fcntl.LOCK_EX | fcntl.LOCK_UN, fcntl.LOCK_UN])
def test_a_file_system_without_locks(file, line, monkeypatch, failing):
    def flock(file, operation):
        if operation & failing:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(report_file.fcntl, "flock", flock)
    line.update()
    line.end()
    (found,) = read(file)
    assert found["ended"] == "exit"


def test_a_report_that_fails_is_no_exception(file, caplog):
    def broken():
        raise ZeroDivisionError("theirs")

    line = report_file._Line(str(file), broken)
    line.update()
    line.end()
    assert [record.getMessage() for record in caplog.records] == [f"{PROBLEM}{file}): theirs"]


# ----------------------------------------------------------------------------- places that cannot be written


PAGE = b" " * 4095 + b"\n"
LINE = b'{"host": "node-\\u00e9 \\"a\\"", "pid": 4711, "rank": null, "patches": []}'


@pytest.mark.parametrize(
    "begins",
    [
        b"",
        LINE + b"\n",
        LINE.ljust(20_000) + b"\n",
        PAGE + LINE,
        b" " * 30_000 + b"\n" + LINE,  # where a line of several pages has moved
        PAGE * 9,
        LINE[:1],
        LINE[:4] + b"\n" + LINE,
        LINE[:13],
        LINE[:40] + b"\n",
        LINE[:40] + b"\n" + PAGE + LINE[:9] + b"\n" + LINE + b"\n",
        LINE + b"\nanything",
    ],
)
def test_what_is_ours_is_added_to(file, line, begins):
    """Whole lines, blanks where one has moved, and what a killed process or a full disk has left of one."""
    file.write_bytes(begins)
    report_file.try_out(str(file))
    assert file.read_bytes() == begins
    line.end()
    data = file.read_bytes()
    assert data.startswith(begins)
    assert json.loads(data.splitlines()[-1])["ended"] == "exit"


FOREIGN = {
    "a script": b"import torch\n",
    "a script after blank lines": b"\n\n   \n#!/bin/sh\n",
    "lines of Windows": b"\r\n\r\nkey: value\r\n",
    "JSON": b'{"lr": 1e-5}',
    "JSON over many lines": b'{\n  "lr": 1e-5\n}\n',
    "JSON that begins as ours": b'{"host": "a", "method": "GET"}\n',
    "JSON over many lines that begins as ours": b'{"host": "a",\n "pid": 1, "rank": null}\n',
    "zeros": b"\0" * 8192,
    "a program": b"\x7fELF\x02\x01\x01",
    "one letter": b"x",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_something_else_stays_as_it_is(file, line, caplog, what):
    file.write_bytes(FOREIGN[what])
    line.update()
    line.end()
    assert file.read_bytes() == FOREIGN[what]
    (record,) = caplog.records
    assert "it has other content" in record.getMessage()
    with pytest.raises(OSError, match="it has other content"):
        report_file.try_out(str(file))


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_not_followed_and_a_folder_that_is_one_is(tmp_path, said, caplog, exists):
    target, link = tmp_path / "target", tmp_path / "link.jsonl"
    link.symlink_to(target)
    if exists:
        target.touch()
    line = report_file._Line(str(link), lambda: said[0])
    line.end()
    assert [record.getMessage() for record in caplog.records] == [
        f"{PROBLEM}{link}): it is a symbolic link: name the file itself (its folder may be a link)"
    ]
    assert target.exists() is exists
    assert not exists or target.read_bytes() == b""
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    report_file._Line(str(tmp_path / "alias" / "run.jsonl"), lambda: said[0]).end()
    assert len(read(tmp_path / "real" / "run.jsonl")) == 1


def test_a_link_put_in_its_place_meanwhile(tmp_path, file, line, said, caplog):
    line.update()
    other = tmp_path / "other"
    file.rename(other)
    file.symlink_to(other)
    before = other.read_bytes()
    said[0] = _report("second")
    line.update()
    assert other.read_bytes() == before
    assert "it is a symbolic link" in caplog.text


def test_somebody_elses_file_in_a_folder_for_everybody(tmp_path, said, caplog, monkeypatch):
    """As /tmp is. What the kernel allows there depends on its settings."""
    shared, other = tmp_path / "shared", tmp_path / "other.jsonl"
    shared.mkdir()
    other.touch()
    file = shared / "run.jsonl"
    os.link(other, file)  # of a file that is ours, by somebody who may not write to it
    line = report_file._Line(str(file), lambda: said[0])
    line.update()
    assert (len(read(file)), caplog.text) == (1, ""), "in a folder of one's own it is one's own business"
    before = file.read_bytes()
    shared.chmod(0o1777)
    report_file._Line(str(file), lambda: said[0]).update()
    assert "it has another hard link" in caplog.text
    other.unlink()
    report_file.try_out(str(file))
    # The folder and the file are of another user than this process; then the folder is, too, which is /tmp's case.
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    report_file.try_out(str(file))
    if own == 0:
        os.chown(shared, 4711, -1)
        with pytest.raises(OSError, match="it belongs to another user"):
            report_file.try_out(str(file))
    assert file.read_bytes() == before


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o644), (0o002, 0o644)])
def test_the_mode_is_the_same_whoever_makes_the_file(tmp_path, said, mask, mode):
    """A process, or `rlhf-patches run --report` before it."""
    old = os.umask(mask)
    try:
        report_file._Line(str(tmp_path / "line"), lambda: said[0]).end()
        run_command._writable(str(tmp_path / "run"))
    finally:
        os.umask(old)
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("line", "run")] == [mode, mode]


def test_what_names_the_file_cannot_move_the_cursor(tmp_path, said, caplog):
    report_file._Line(str(tmp_path / "no" / "\x1b[2J\nfolder"), lambda: said[0]).end()
    (record,) = caplog.records
    assert record.getMessage().isprintable()
