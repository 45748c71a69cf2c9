"""RLHF_PATCHES_REPORT: one line per process, whatever becomes of the process, the disk, and the file."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_patches.runs import report_reader
from tests.harness import no_locks, toy_slime
from tests.harness.effort import SHARE
from tests.harness.report_lines import PROBLEM, read, status
from tests.harness.toy_slime_fixtures import make_refused

APPLY = "import rlhf_patches; rlhf_patches.apply()"
IMPORT = toy_slime.IMPORT


@pytest.fixture
def slime(tmp_path):
    return toy_slime.write(tmp_path / "slime-checkout")


def run(code, folder, file, *before, **settings):
    """Run code as a script; its report goes to ``file``."""
    (folder / "job.py").write_text(code)
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")}
    environment = {**inherited, "RLHF_PATCHES_REPORT": str(file), **settings}
    command = [*before, sys.executable, "job.py"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)


# ------------------------------------------------------------------------------------------ when, and what


def test_the_line_is_there_at_once_and_kept_up_to_date(slime, file):
    code = f"""
import json, os, sys
sys.argv += ["--api-key", "secret"]
def look():
    lines = open({str(file)!r}) if os.path.exists({str(file)!r}) else []
    print(json.dumps([json.loads(line) for line in lines if line.strip()]))  # one that has moved leaves a blank
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
        assert (status(line), line["ended"]) == ("pending", "exception ZeroDivisionError" if "/" in end else "exit")


def test_a_child_of_multiprocessing_that_an_exception_ends(slime, file):
    code = f"{APPLY}\nimport multiprocessing\ndef job(): {IMPORT}; {{}}['gone']\n"
    code += "one = multiprocessing.get_context('fork').Process(target=job); one.start(); one.join()"
    run(code, slime, file)
    # From Python 3.13 on, multiprocessing has dealt with the exception by then, and nothing tells of it.
    child = "exception KeyError" if sys.version_info < (3, 13) else "exit"
    assert sorted(line["ended"] for line in read(file)) == sorted([child, "exit"])


def test_a_strict_refusal_is_on_record(slime, file):
    make_refused(slime)
    end = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    done = run(f"{APPLY}\ntry:\n    {IMPORT}\nexcept Exception: {end}", slime, file, RLHF_PATCHES_STRICT="1")
    assert done.returncode == -signal.SIGKILL
    (line,) = read(file)
    assert status(line) == "refused"
    assert line["versions"]["slime"] == "0.1.0"


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
import json, os, sys
{APPLY}
{IMPORT}
def child(act):
    pid = os.fork()
    if not pid:
        act()
        sys.exit()
    os.waitpid(pid, 0)
    print(pid)
    lines = [json.loads(line) for line in open({str(file)!r}) if line.strip()]
    assert os.getpid() in [line["pid"] for line in lines], "the parent's line is gone"
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
    summary = report_reader.summarize([str(file)])
    assert [process.ended for process in summary.processes] == ["exit"]


@pytest.mark.exhaustive
def test_hundreds_of_processes_at_once(slime, file):
    """Each appends at the same moment, then rewrites its line many times; they end in all sorts of ways."""
    number_of_children = 200 // SHARE
    code = f"""
import os, signal
{APPLY}
{IMPORT}
rlhf_patches.revert()
from rlhf_patches.runs import report_file
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
    summary = report_reader.summarize([str(file)])
    assert (len(summary.processes), len(summary.not_ended)) == (number_of_children + 1, number_of_children // 5 + 1)


# ------------------------------------------------------------------------------------------ the file


def test_a_variable_that_names_the_script(slime):
    """RLHF_PATCHES_REPORT=train.py, where the line would make a syntax error of the script."""
    code = f"{APPLY}\n{IMPORT}\nprint('trained')"
    done = run(code, slime, slime / "job.py")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "trained\n", 1)
    assert (slime / "job.py").read_text() == code


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
    assert (place in (_a_pipe, _a_device)) == ("it is not a regular file" in said)
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


@pytest.mark.skipif(not no_locks.can_be_made(), reason="no compiler")
@pytest.mark.parametrize("way", no_locks.WAYS)
def test_a_disk_whose_locks_fail(slime, file, tmp_path, way):
    """`benchmarks/load.py disks` has many processes at once."""
    for rank in ("0", "1"):
        done = run(f"{APPLY}\n{IMPORT}", slime, file, RANK=rank, **no_locks.preload(tmp_path, way))
        assert (done.returncode, done.stderr) == (0, "")
    assert [(line["rank"], status(line), line["ended"]) for line in read(file)] == [
        (rank, "applied", "exit") for rank in ("0", "1")
    ]
