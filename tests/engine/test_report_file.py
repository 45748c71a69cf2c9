"""RLHF_PATCHES_REPORT: one line a process, whatever becomes of the process, the disk, and the file."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import toy_slime
from effort import SHARE

from rlhf_patches import PatchReport, Report, Status, cli, report_file, run_summary
from rlhf_patches.plugins import PluginFailure

APPLY = "import rlhf_patches; rlhf_patches.apply()"
IMPORT = toy_slime.IMPORT
PROBLEM = "cannot write the report (RLHF_PATCHES_REPORT="


@pytest.fixture
def slime(tmp_path):
    return toy_slime.write(tmp_path / "slime-checkout")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "report.jsonl"


def run(code, folder, file, *before, **settings):
    """Run code as a script; its report goes to ``file``."""
    (folder / "job.py").write_text(code)
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
    environment = {**inherited, "RLHF_PATCHES_REPORT": str(file), **settings}
    command = [*before, sys.executable, "job.py"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


def read(file):
    """Every line, none of which may be damaged."""
    data = Path(file).read_bytes()
    assert data.endswith(b"\n")
    assert b"\0" not in data
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def status(line):
    return next(patch["status"] for patch in line["patches"] if patch["name"] == toy_slime.PATCH)


# ------------------------------------------------------------------------------------------ when, and what


def test_the_line_is_there_at_once_and_kept_up_to_date(slime, file):
    code = f"""
import json, os, sys
def look():
    print(json.dumps([json.loads(line) for line in open({str(file)!r})] if os.path.exists({str(file)!r}) else []))
{APPLY}
look()
{IMPORT}
look()
os.environ["RANK"] = "5"  # as a Ray actor learns it
rlhf_patches.revert()
look()
rlhf_patches.apply()
"""
    done = run(code, slime, file, WORLD_SIZE="8", LOCAL_RANK="1")
    assert (done.returncode, done.stderr) == (0, "")
    waiting, imported, reverted = map(json.loads, done.stdout.splitlines())
    assert waiting == [], "while every patch waits there is nothing to say"
    (first,), (second,), (last,) = imported, reverted, read(file)
    assert [status(line) for line in (first, second, last)] == ["applied", "disabled", "applied"]
    assert [line["ended"] for line in (first, second, last)] == [None, None, "exit"]
    assert [line["rank"] for line in (first, second, last)] == [None, "5", "5"]
    assert (first["world_size"], last["world_size"], last["local_rank"]) == (None, "8", "1")
    assert last["command"] == ["job.py"]
    assert last["python"] == ".".join(map(str, sys.version_info[:3]))
    for key in ("host", "pid", "process", "started", "python", "rlhf_patches", "versions", "plugin_failures"):
        assert first[key] == last[key] is not None
    assert first["started"] <= first["written"] < last["written"]


def test_versions_of_what_the_frameworks_stand_on(slime, file):
    fake = "import sys, types; sys.modules['torch'] = types.SimpleNamespace(__version__='2.13.0+cpu')\n"
    broken = "class Bad:\n    def __getattr__(self, name): raise RuntimeError(name)\nsys.modules['ray'] = Bad()\n"
    assert run(f"{fake}{broken}{APPLY}; {IMPORT}", slime, file).returncode == 0
    (line,) = read(file)
    assert (line["versions"]["torch"], "ray" in line["versions"]) == ("2.13.0+cpu", False)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), 15)", "os._exit(3)"])
def test_a_process_that_is_killed_leaves_its_line(slime, file, end):
    done = run(f"import os, signal\n{APPLY}\n{IMPORT}\n{end}", slime, file, RANK="1")
    assert done.returncode != 0
    (line,) = read(file)
    assert (status(line), line["ended"], line["rank"]) == ("applied", None, "1")


@pytest.mark.parametrize(("end", "count"), [("os._exit(3)", 0), ("", 1), ("raise SystemExit(3)", 1), ("1 / 0", 1)])
def test_a_process_that_imports_no_framework_has_a_line_when_it_ends(slime, file, end, count):
    run(f"import os\n{APPLY}\n{end}", slime, file)
    assert file.exists() is bool(count)
    if count:
        (line,) = read(file)
        assert (status(line), line["ended"]) == ("pending", "exit")


def test_a_strict_refusal_is_on_record(slime, file):
    model = slime / "slime" / "backends" / "megatron_utils" / "model.py"
    model.write_text(model.read_text().replace("config.no_sync_func is None", "not config.no_sync_func"))
    metadata = slime / "slime-0.3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: slime\nVersion: 0.3.1\n")
    end = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = run(f"{APPLY}\ntry:\n    {IMPORT}\nexcept Exception: {end}", slime, file, RLHF_PATCHES_STRICT="1")
    assert done.returncode == -signal.SIGKILL
    (line,) = read(file)
    assert status(line) == "refused"
    assert line["versions"]["slime"] == "0.3.1"


def test_a_relative_path_is_meant_from_where_the_process_started(slime, tmp_path):
    code = f"import os\n{APPLY}\nos.chdir('/')\n{IMPORT}"
    assert run(code, slime, "report.jsonl").returncode == 0
    (line,) = read(slime / "report.jsonl")
    assert line["ended"] == "exit"


def test_a_working_directory_that_is_gone(slime):
    gone = "import os, tempfile; folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder)"
    done = run(f"{gone}\n{APPLY}\n{IMPORT}\nprint('trained')", slime, "report.jsonl")
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (said,) = done.stderr.splitlines()
    assert PROBLEM in said


# ------------------------------------------------------------------------------------------ children


def test_forked_children_never_touch_the_parents_line(slime, file):
    code = f"""
import os, sys
{APPLY}
{IMPORT}
def child(act):
    pid = os.fork()
    if not pid:
        act()
        sys.exit()
    os.waitpid(pid, 0)
    print(pid)
child(lambda: None)                                        # ends in order
child(lambda: os._exit(0))                                 # has nothing of its own to say
child(lambda: (rlhf_patches.revert(), os._exit(0)))        # has, and is gone
rlhf_patches.revert()
print(os.getpid())
"""
    done = run(code, slime, file)
    assert done.returncode == 0, done.stderr
    ends, _, reverts, parent = map(int, done.stdout.split())
    found = {line["pid"]: (status(line), line["ended"]) for line in read(file)}
    assert found == {ends: ("applied", "exit"), reverts: ("disabled", None), parent: ("disabled", "exit")}
    assert len({line["process"] for line in read(file)}) == 3


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("imported_before", [True, False])
def test_multiprocessing(slime, file, method, imported_before):
    """Its children skip atexit; a pool's workers end in order after close()."""
    early = "import multiprocessing\n" if imported_before else ""
    code = f"""
{early}{APPLY}
import multiprocessing
def look(number):
    {IMPORT}
    import os, time
    time.sleep(0.2)
    return os.getpid()
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    pool = context.Pool(2)
    workers = set(pool.map(look, range(4), chunksize=1))
    pool.close(); pool.join()
    process = context.Process(target=print, args=("child",))
    process.start(); process.join()
    print(*workers, process.pid)
"""
    done = run(code, slime, file)
    assert done.returncode == 0, done.stderr
    _, pids = done.stdout.splitlines()
    found = {line["pid"]: line for line in read(file)}
    assert len(found) == len(read(file)) >= 4
    *workers, plain = (found[int(pid)] for pid in pids.split())
    assert [(status(line), line["ended"]) for line in workers] == [("applied", "exit")] * len(workers)
    assert (status(plain), plain["ended"]) == ("pending", "exit")


def test_a_process_that_becomes_another_program_counts_once(slime, file):
    again = f"{APPLY}; {IMPORT}"
    become = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {again!r}])"
    assert run(f"{APPLY}\n{IMPORT}\n{become}", slime, file).returncode == 0
    first, last = read(file)
    assert [line["ended"] for line in (first, last)] == [None, "exit"]
    assert first["process"] == last["process"]
    summary = run_summary.summarise([str(file)])
    assert [process.ended for process in summary.processes] == ["exit"]


def test_hundreds_of_processes_at_once(slime, file):
    """Each appends at the same moment, then rewrites its line many times; they end in all sorts of ways."""
    number_of_children = 200 // SHARE
    code = f"""
import os, signal
{APPLY}
{IMPORT}
rlhf_patches.revert()
from rlhf_patches import report_file
ready, go = os.pipe()
children = []
for number in range({number_of_children}):
    pid = os.fork()
    if not pid:
        os.close(go)
        os.read(ready, 1)
        rlhf_patches.apply(only={toy_slime.PATCH!r})
        for rank in range(number % 20):
            os.environ["RANK"] = str(rank)
            report_file._line.update()
        if number % 5 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit
    children.append(pid)
os.close(go)
for pid in children:
    os.waitpid(pid, 0)
print(*children)
os._exit(0)
"""
    done = run(code, slime, file)
    assert done.returncode == 0, done.stderr
    children = [int(pid) for pid in done.stdout.split()]
    found = read(file)
    by_pid = {line["pid"]: line for line in found}
    assert len(found) == len(by_pid) == number_of_children + 1, "the parent has one too"
    for number, pid in enumerate(children):
        line, last = by_pid[pid], number % 20 - 1
        assert (status(line), line["ended"]) == ("applied", "exit" if number % 5 else None)
        assert line["rank"] == (None if last < 0 else str(last))
    summary = run_summary.summarise([str(file)])
    assert (len(summary.processes), len(summary.not_ended)) == (number_of_children + 1, number_of_children // 5 + 1)


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
    line.update()
    assert file.read_bytes() == before
    said[0] = _report("second")
    line.update()
    assert (reasons(file), len(file.read_bytes())) == (["second"], len(before))
    assert len(before) % 4096 == 0


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
    summary = run_summary.summarise([str(file)])
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
    monkeypatch.setattr(report_file, "_patience", 0.05)
    file.touch()
    with open(file, "rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        line.update()
        line.end()
        assert report_file._patience == 0, "the second time there is no wait"
    (found,) = read(file)
    assert found["ended"] == "exit"


def test_a_file_system_without_locks(file, line, monkeypatch):
    def flock(file, operation):
        raise OSError(95, "Operation not supported")

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
    assert "it holds something else" in record.getMessage()
    with pytest.raises(OSError, match="it holds something else"):
        report_file.try_out(str(file))


def test_a_variable_that_names_the_script(slime):
    """RLHF_PATCHES_REPORT=train.py, where the line would make a syntax error of the script."""
    code = f"{APPLY}\n{IMPORT}\nprint('trained')"
    done = run(code, slime, slime / "job.py")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "trained\n", 1)
    assert (slime / "job.py").read_text() == code


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
    assert "it has another name, too" in caplog.text
    other.unlink()
    report_file.try_out(str(file))
    # The folder and the file are of another user than this process; then the folder is, too, which is /tmp's case.
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    report_file.try_out(str(file))
    if own == 0:
        os.chown(shared, 4711, -1)
        with pytest.raises(OSError, match="it belongs to somebody else"):
            report_file.try_out(str(file))
    assert file.read_bytes() == before


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o644), (0o002, 0o644)])
def test_the_mode_is_the_same_whoever_makes_the_file(tmp_path, said, mask, mode):
    """A process, or `rlhf-patches run --report` before it."""
    old = os.umask(mask)
    try:
        report_file._Line(str(tmp_path / "line"), lambda: said[0]).end()
        cli._writable(str(tmp_path / "run"))
    finally:
        os.umask(old)
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("line", "run")] == [mode, mode]


def test_what_names_the_file_cannot_move_the_cursor(tmp_path, said, caplog):
    report_file._Line(str(tmp_path / "no" / "\x1b[2J\nfolder"), lambda: said[0]).end()
    (record,) = caplog.records
    assert record.getMessage().isprintable()


def _a_folder(tmp_path):
    return tmp_path


def _no_folder(tmp_path):
    return tmp_path / "missing" / "report.jsonl"


def _under_a_file(tmp_path):
    (tmp_path / "plain").touch()
    return tmp_path / "plain" / "report.jsonl"


def _a_pipe(tmp_path):
    """Opened for writing, it would wait for a reader for ever."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def _a_device(tmp_path):
    return Path("/dev/full")


@pytest.mark.parametrize("place", [_a_folder, _no_folder, _under_a_file, _a_pipe, _a_device])
def test_a_place_that_cannot_be_written_costs_one_line(slime, tmp_path, place):
    path = place(tmp_path)
    code = f"{APPLY}\n{IMPORT}\nrlhf_patches.revert()\nrlhf_patches.apply()\nprint('trained')"
    done = run(code, slime, path)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (said,) = done.stderr.splitlines()
    assert f"{PROBLEM}{path})" in said
    assert (place in (_a_pipe, _a_device)) == ("it is no regular file" in said)
    assert run(code, slime, path, RANK="1").stderr == ""
    assert not (tmp_path / "missing").exists()


SIZE = 4096 + 1000


def test_a_write_that_is_cut_short_leaves_no_torn_line(slime, file):
    """With the limit on a file's size standing in for the disk: a write up to it is cut, one beyond it an error."""
    file.write_bytes(b" " * 4095 + b"\n")
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({SIZE}, resource.RLIM_INFINITY))\n"
    more = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
    done = run(f"{limit}{APPLY}\n{IMPORT}\nprint('trained')", slime, file)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    (said,) = done.stderr.splitlines()
    assert PROBLEM in said
    assert "only 1000 of " in said
    assert file.read_bytes() == (b" " * 4095 + b"\n") + b" " * 999 + b"\n"
    assert run(f"{limit}{APPLY}\n{IMPORT}\n{more}", slime, file).returncode == 0, "space again before the end"
    (line,) = read(file)
    assert (status(line), line["ended"]) == ("applied", "exit")


def _mounted(script, folder):
    """A command in front of another: runs it in a mount namespace of its own, where the script has been run."""
    here = f'mount -t tmpfs -o size=16k tmpfs {shlex.quote(str(folder))} && {script} && exec "$@"'
    before = ["unshare", "-m", "sh", "-c", here, "sh"]
    try:
        done = subprocess.run([*before, "true"], capture_output=True, timeout=60)
    except OSError:
        pytest.skip("no unshare")
    if done.returncode:
        pytest.skip("this machine lets nobody mount")
    return before


@pytest.mark.parametrize("pages", [3, 4])
def test_a_full_disk(slime, tmp_path, pages):
    """A real one: 16 KB, of which 4 or none are free."""
    disk = tmp_path / "disk"
    disk.mkdir()
    path = disk / "report.jsonl"
    before = _mounted(f"head -c {pages * 4096 - 1} /dev/zero | tr '\\0' ' ' > {path} && echo >> {path}", disk)
    look = f"import sys; sys.stdout.write(open({str(path)!r}).read().rstrip(' '))"
    done = run(f"{APPLY}\n{IMPORT}\n{look}", slime, path, *before)
    assert done.returncode == 0
    # A line has 8 KB here: one page of it found room.
    assert done.stdout.split() == []
    assert done.stdout.endswith("\n")
    (said,) = done.stderr.splitlines()
    assert PROBLEM in said


def test_a_read_only_disk(slime, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    path = disk / "report.jsonl"
    before = _mounted(f"touch {path} && mount -o remount,ro {disk}", disk)
    for target in (path, disk / "another.jsonl"):
        done = run(f"{APPLY}\n{IMPORT}\nprint('trained')", slime, target, *before)
        assert (done.returncode, done.stdout) == (0, "trained\n")
        (said,) = done.stderr.splitlines()
        assert "Read-only file system" in said
