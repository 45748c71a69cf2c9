"""``rlhf-patches diagnose``: which logs are read, in what form, and what is said of them."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
import pickle
import random
import sys
import tracemalloc

import pytest

from rlhf_patches.definitions import registry
from rlhf_patches.offline import diagnose, json_lines, logs, tracebacks
from rlhf_patches.offline.tracebacks import FRAMES, HEAD, TAIL
from tests.harness import toy_slime
from tests.harness.logs import diagnosed

BUG = toy_slime.PATCH
MESSAGE = (
    "When overlap_grad_reduce is True, config.no_sync_func must be None; a custom no_sync_func is not supported when "
    "overlapping grad-reduce"
)
TRACE = f"""\
Traceback (most recent call last):
  File "/app/run.py", line 3, in <module>
    train()
  File "/app/slime/backends/megatron_utils/model.py", line 2, in train
    assert config.no_sync_func is None, (
AssertionError: {MESSAGE}
"""
# What torch 2.13's launcher writes beside the logs of a rank, from a real timeout of gloo; its frames are cut.
ERROR_JSON = """\
{"message": {"message": "RuntimeError: boom", "extraInfo": {"py_callstack": "Traceback (most recent call last):\\n  \
File \\"/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py\\", line 367, in wrapper\\n    \
return f(*args, **kwargs)\\nRuntimeError: boom\\n", "timestamp": "1795418323"}}}"""


@pytest.fixture
def folder(tmp_path):
    """What ``torchrun --log-dir`` makes, with a bug on the second rank."""
    for rank in "01":
        of_rank = tmp_path / "none_9nja9d8w" / "attempt_0" / rank
        of_rank.mkdir(parents=True)
        (of_rank / "stdout.log").write_text("step 1\n")
        (of_rank / "stderr.log").write_text(TRACE if rank == "1" else "")
    (of_rank.parent / "0" / "error.json").write_text(ERROR_JSON)
    return tmp_path


def test_a_folder_of_ranks(said, folder):
    status, out, err = said("diagnose", folder)
    file = folder / "none_9nja9d8w/attempt_0/1/stderr.log"
    assert (status, err) == (1, "")
    assert out.startswith(
        f"{BUG}: certain (exception, message and function match); first at {file} line 6 (local rank 1)\n"
    )
    found = json.loads(said("diagnose", "--json", folder)[1])
    assert (found["files"], found["exceptions"]) == (5, 2)
    assert [(bug["name"], bug["file"], bug["rank"]) for bug in found["bugs"]] == [(BUG, str(file), "local rank 1")]
    assert f"{file} line 6 (local rank 1)" in said("diagnose", "--quiet", folder)[2]


def test_several_files(said, folder, tmp_path):
    for rank in range(12):
        (tmp_path / f"rank_{rank}.log").write_text(TRACE)
    (tmp_path / "all.log").write_text("".join(f"[rank3]: {line}\n" for line in TRACE.splitlines()))
    names = sorted(tmp_path.glob("*.log"))
    status, out, _ = said("diagnose", *names)
    assert status == 1
    assert f"first at {tmp_path}/all.log line 6 ([rank3]:), 13 times, rank 0, rank 1, " in out
    assert "rank 7 and 4 more\n" in out
    status, out, err = said("diagnose", names[0], tmp_path / "gone", tmp_path / "a\0b")
    assert (status, out.startswith(f"{BUG}: certain"), err.count("\n")) == (2, True, 2)
    assert f"cannot read {tmp_path}/gone: No such file or directory\n" in err


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("logs/x/attempt_1/7/stdout.log", "local rank 7"),
        ("logs/rank3.log", "rank 3"),
        ("node-1/global_rank_12/err", "rank 12"),
        ("Rank-0.txt", "rank 0"),
        ("ranked/frank3.log", ""),
        ("7/stdout.log", ""),
    ],
)
def test_the_rank_that_a_path_names(path, rank):
    assert logs.rank_of(path) == rank


def test_only_what_may_be_a_log_is_read_in_a_folder(said, folder):
    dump = folder / "nccl_trace_rank_0"
    dump.write_bytes(pickle.dumps({"version": "2.4", "entries": [TRACE]}))
    (folder / "model.bin").write_bytes(b"\0" * 99 + TRACE.encode())
    os.mkfifo(folder / "pipe")
    (folder / "round").symlink_to(folder)
    status, out, err = said("diagnose", folder)
    assert (status, ", 2 times" in out) == (1, False)
    assert f"{folder}/model.bin is not text\n" in err
    assert f"{dump} is a pickle, as PyTorch's flight recorder writes: not read" in err
    # Named by itself it was to be read; and a log that begins with NULs was truncated by who rotates logs.
    assert (said("diagnose", dump)[0], said("diagnose", folder / "model.bin")[0]) == (2, 1)


def test_a_folder_of_too_many_files(said, folder, monkeypatch):
    monkeypatch.setattr(logs, "_MOST_FILES", 4)
    status, _, err = said("diagnose", folder)
    assert (status, err.count("\n"), "has more than 4 files" in err) == (2, 1, True)


@pytest.mark.parametrize("text", ["", "step 1: loss 2.5\n", '{"loss": 2.5, "message": "step"}\n', "\0\1\2"])
def test_nothing_understood(said, tmp_path, text):
    log = tmp_path / "a.log"
    log.write_text(text)
    status, out, err = said("diagnose", log)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"no exception and no hang in {log}: expected a training log" in err
    (tmp_path / "b.log").write_text("")
    assert "no exception and no hang in 2 files: " in said("diagnose", log, tmp_path / "b.log")[2]


def test_compressed(said, folder, tmp_path, monkeypatch):
    packed = tmp_path / "train.log.gz"
    packed.write_bytes(gzip.compress(TRACE.encode()) + gzip.compress(b"[rank1]: ValueError: 3\n"))
    status, out, err = said("diagnose", packed)
    assert (status, "certain" in out, err) == (1, True, "")
    with packed.open("rb") as stream:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
        assert said("diagnose", "-")[0] == 1
    # A job that was killed leaves a file without an end: what is there counts, and that it has no end is said.
    noise = random.Random(0).randbytes(200_000).hex().encode()
    whole = gzip.compress(TRACE.encode() + noise)
    for damaged, what in ((whole[:-9000], "was not read to its end"), (whole[:-8] + b"12345678", "cannot read")):
        packed.write_bytes(damaged)
        status, out, err = said("diagnose", packed)
        assert (status, "certain" in out, err.count("\n"), what in err) == (2, True, 1, True)


@pytest.mark.parametrize(
    "line", [b"x" * (1 << 16), b"step 1: loss 2.5 Error" * 99 + b"\n", b'{"E": "' + b"x" * 100_000 + b'"}\n']
)
def test_what_is_decompressed_takes_no_memory(tmp_path, line):
    """Eight MiB in 8 KiB. Lines are read as they come, so all of it may be of any size."""
    packed = tmp_path / "bomb.gz"
    block = gzip.compress(line * ((1 << 20) // len(line) + 1))
    packed.write_bytes(block * 8)
    tracemalloc.start()
    read = logs.Logs([str(packed)])
    assert list(read) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak < 3 * 2**20, read.problems) == (True, [])


@pytest.mark.one_python
def test_a_compressed_line_without_an_end(said, tmp_path):
    packed = tmp_path / "bomb.gz"
    packed.write_bytes(gzip.compress(b"x" * (1 << 20)) * 300)
    assert said("diagnose", packed)[::2] == (
        2, f"rlhf-patches: {packed}: line 1 has more than 256 MiB: expected a log, which is text\n",
    )  # fmt: skip


class _Formatter(logging.Formatter):
    """As python-json-logger and structlog have it."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def format(self, record):
        found = {"level": record.levelname, "message": record.getMessage(), "rank": 2}
        text = self.formatException(record.exc_info)
        if "." in self.name:
            outer, inner = self.name.split(".")
            return json.dumps({**found, outer: {inner: text}})
        return json.dumps({**found, self.name: f"{found['message']}\n{text}" if self.name == "message" else text})


@pytest.mark.parametrize("name", ["exc_info", "stack_trace", "error.stack_trace", "exception", "message", "anything"])
def test_a_log_of_objects(tmp_path, name):
    """Of a real logger, and a real exception."""
    place = tmp_path / "slime" / "backends" / "megatron_utils" / "model.py"
    place.parent.mkdir(parents=True)
    place.write_text(f"def train():\n    assert not 1, {MESSAGE!r}\n")
    names = {}
    exec(compile(place.read_text(), str(place), "exec"), names)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(_Formatter(name))
    logger = logging.Logger("train")
    logger.addHandler(handler)
    try:
        names["train"]()
    except AssertionError:
        logger.exception("training failed")
    log = '{"level": "INFO", "message": "step 1"}\n' + said.getvalue()
    assert diagnosed(log) == [(BUG, True)]
    (raised,) = tracebacks.read(io.BytesIO(log.encode()))
    assert (raised.line, raised.rank) == (2, "rank 2")
    # As a collector of containers has it: an object within an object, behind a launcher's prefix.
    packed = "".join(f"[rank1]: {json.dumps({'log': line, 'stream': 'stderr'})}\n" for line in log.splitlines(True))
    assert diagnosed(packed) == [(BUG, True)]


def test_an_object_for_each_line():
    """Docker's."""
    log = "".join(json.dumps({"log": line, "stream": "stderr"}) + "\n" for line in TRACE.splitlines(True))
    assert diagnosed(log) == [(BUG, True)]
    assert len(list(tracebacks.read(io.BytesIO(log.encode())))) == 1


def test_what_two_fields_say_was_raised_once():
    log = json.dumps({"message": f"failed\n{TRACE}", "exc_info": TRACE, "error": "AssertionError"})
    assert len(list(tracebacks.read(io.BytesIO(log.encode())))) == 1
    other = TRACE.replace("AssertionError", "KeyError")
    assert len(list(tracebacks.read(io.BytesIO(json.dumps([log, other, {}])[1:].encode())))) == 0
    assert len(list(tracebacks.read(io.BytesIO(json.dumps({"a": [TRACE, other]}).encode())))) == 2


@pytest.mark.one_python
@pytest.mark.parametrize(
    "line",
    [
        '{"a": ' * 20_000,
        '{"a": ' + "[" * 60_000 + "]" * 60_000 + "}",
        '{"Error": ' + "1" * 200_000 + "}",
        '{"Error": [' + "[]," * 60_000 + "[]]}",
        '{"log": "' + '{\\"log\\": \\"E' * 5_000 + '"}',
        '{"log": "' + "E\\n" * 60_000 + '"}',
        '{"Error": "' + "x" * (1 << 19),
        '{"rank": "' + "1" * 200_000 + '", "log": "ValueError: 3"}',
    ],
    ids=lambda line: ascii(line[:14]),
)
def test_objects_that_are_made_to_do_harm(line):
    tracemalloc.start()
    for raised in tracebacks.read(io.BytesIO((line + "\n").encode() * 2)):
        assert len(raised.stream) <= 500
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 * 2**20


def test_an_object_that_is_cut_off_is_text():
    line = json.dumps({"message": "x" * json_lines.LONGEST, "exc_info": TRACE})
    log = f"{line}\n{TRACE}"
    assert [raised.line for raised in tracebacks.read(io.BytesIO(log.encode()))] == [7]


LINES = TRACE.splitlines(True)
NOISE = "".join(f"step {number}\n" for number in range(5))


def matches(log):
    """The bugs of a log, how sure they are, and what is missing."""
    found, _ = diagnose.diagnose(tracebacks.read(io.BytesIO(log.encode())), registry.load()[0])
    return [(one.item.patch.name, one.match, one.first.cut) for one in found]


OTHER = '  File "/app/slime/backends/megatron_utils/model.py", line 9, in other\n    assert x\n'
CUT = {
    # `tail -n 3`, which has the function: nothing that is missing matters.
    "certain without its head": (LINES[3:], (BUG, "certain", HEAD)),
    "a head": (['  File "/usr/lib/python3.11/x.py", line 1, in f\n', "    x\n", LINES[-1]], (BUG, "possible", HEAD)),
    "frames elided": ([LINES[0], "  [... skipping hidden 3 frame]\n", *LINES[1:3], LINES[-1]],
                      (BUG, "possible", FRAMES)),
    "the function's frame": ([*LINES[:3], OTHER, LINES[-1]], (BUG, "possible", "")),
    "no exception": (LINES[:-1], (BUG, "possible", TAIL)),
    "neither source nor exception": (LINES[:-2], (BUG, "possible", TAIL)),
    "half of the type": ([*LINES[:-1], "Assert"], (BUG, "possible", TAIL)),
    "half of the text": ([*LINES[:-1], LINES[-1][:40]], (BUG, "possible", TAIL)),
    "all but the last end of line": ([*LINES[:-1], LINES[-1].rstrip("\n")], (BUG, "certain", TAIL)),
}  # fmt: skip


@pytest.mark.parametrize("case", CUT)
def test_what_is_cut_off(case):
    lines, expected = CUT[case]
    assert expected in matches("".join(lines))
    ranked = "".join(f"[rank1]: {line}" for line in lines)
    assert expected in matches(ranked)


@pytest.mark.parametrize(
    "log",
    [
        # The exception of another bug, whole and cut off.
        TRACE.replace(MESSAGE, "the batch is empty"),
        "".join([*LINES[:-1], "AssertionError: the batch is emp"]),
        "".join([*LINES[:-1], "ValueErr"]),
        "".join([*LINES[:-1], "AssertionError: Who"]),
        # A stack that was printed, with the work going on.
        "".join(LINES[:-1]) + NOISE,
        # The text cut off, without its function.
        f"{LINES[0]}{LINES[1]}{LINES[2]}{LINES[-1][:40]}",
        # Another function, without the last end of a line.
        TRACE.replace("slime/", "own/").rstrip(),
        # Anything raises a KeyError.
        '  File "/app/x.py", line 1, in f\n    x\nKeyError: 3\n',
    ],
    ids=range(8),
)
def test_what_is_cut_off_elsewhere(log):
    assert matches(log) == []


def test_what_is_said_of_it(said, tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(LINES[:-1]))
    status, out, _ = said("diagnose", log)
    assert status == 1
    assert out.startswith(f"{BUG}: possible (in the traceback its end is cut off); first at line 4\n    affected: ")
    assert [bug["match"] for bug in json.loads(said("diagnose", "--json", log)[1])["bugs"]] == ["possible"]
