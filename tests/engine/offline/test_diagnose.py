"""``rlhf-patches diagnose``: logs of many ranks, colored and prefixed; nothing in tracebacks of other kinds.

That the real bugs are found in the tracebacks of real runs stands with the patches (tests/patches).
"""

from __future__ import annotations

import io
import json
import re
import sys
import traceback
import tracemalloc

import pytest

from rlhf_patches import DefinitionError, Signature, cli
from rlhf_patches.offline import tracebacks
from rlhf_patches.patches import plugin
from tests.harness import toy_slime
from tests.harness.effort import SHARE
from tests.harness.logs import diagnosed

BUG = toy_slime.PATCH
MESSAGE = (
    "When overlap_grad_reduce is True, config.no_sync_func must be None; a custom no_sync_func is not supported when "
    "overlapping grad-reduce"
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The traceback of a real raise, in a file that lies where slime's does."""
    folder = tmp_path_factory.mktemp("site") / "slime" / "backends" / "megatron_utils"
    folder.mkdir(parents=True)
    file = folder / "model.py"
    file.write_text(f"def train():\n    assert not 1, {MESSAGE!r}\n")
    names = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    try:
        names["train"]()
    except AssertionError:
        return traceback.format_exc()


def prefixed(text, prefix):
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[rank3]: ",
        "[default0]:",
        "0: ",
        "(TrainActor pid=12, ip=10.0.0.1) ",
        "\x1b[36m(TrainActor pid=12)\x1b[0m ",
        "\x1b[36m(raylet, ip=1.2.3.4, pid=9)\x1b[0m [rank0]: ",
        "(EngineCore_0 pid=7) ERROR 01-02 03:04:05 [core.py:700] ",
    ],
)
def test_prefixes_and_colors(trace, prefix):
    noise = prefixed("step 1 loss 2.5\nsaving\n", prefix)
    assert diagnosed(noise + prefixed(trace, prefix) + noise) == [(BUG, True)]
    colored = "\x1b[31m" + trace.replace("AssertionError", "\x1b[1mAssertionError\x1b[0m")
    assert diagnosed(prefixed(colored, prefix)) == [(BUG, True)]


@pytest.mark.parametrize("prefixes", [("[rank0]: ", "[rank1]: "), ("", "")])
def test_interleaved_ranks(trace, prefixes):
    """Of two ranks with prefixes, and of two that write into one stream, where one traceback cannot be told apart."""
    other = "Traceback (most recent call last):\n  File \"/x/data.py\", line 3, in load\n    a\nKeyError: 'text'\n"
    one, two = (
        [prefix + line for line in text.splitlines()] for prefix, text in zip(prefixes, (trace, other), strict=True)
    )
    two += [""] * (len(one) - len(two))
    log = "\n".join(line for pair in zip(one, two, strict=True) for line in pair) + "\n"
    assert diagnosed(log) == [(BUG, True)]


def test_without_a_traceback_any_framework_may_have_raised_it(trace):
    found = diagnosed(f"[rank0]: AssertionError: {MESSAGE}\n")
    assert {name for name, _ in found} >= {BUG, "verl-no-sync-reentry"}
    assert not any(sure for _, sure in found)
    assert diagnosed(f"AssertionError: {MESSAGE}\n{trace}") == [(BUG, True)]


def test_the_text_in_another_place_is_another_bug(trace):
    assert diagnosed(trace.replace("slime/backends/megatron_utils/model.py", "own/trainer.py")) == []
    assert diagnosed(trace.replace("AssertionError: ", "ValueError: ")) == []


UNRELATED = """
{}["loss"]
[][3]
int("three")
None.step
1 / 0
open("/no/such/checkpoint")
import no_such_package
from json import no_such_name
import json; json.loads("{")
b"\\xff".decode()
"x" + 1
len(3)
print(undefined)
assert False, "config is wrong"
raise RuntimeError("CUDA error: an illegal memory access was encountered")
raise RuntimeError("NCCL communicator was aborted on rank 3.")
import subprocess; subprocess.run(["false"], check=True)
import subprocess; subprocess.run(["sleep", "9"], timeout=0.01)
import socket; socket.create_connection(("127.0.0.1", 1))
import concurrent.futures as c; c.Future().result(timeout=0)
import pickle; pickle.dumps(lambda: 0)
2.0 ** 9999
import ast; ast.parse("def f(:")
compile("if", "x", "exec")
import importlib; importlib.import_module("a.b")
from packaging.version import Version; Version("one")
from packaging.requirements import Requirement; Requirement("a b c")
import re; re.compile("(")
import tomllib; tomllib.loads("= 1")
import struct; struct.unpack("i", b"")
next(iter(()))
import asyncio; asyncio.run(asyncio.wait_for(asyncio.sleep(9), 0.01))
import zipfile, io; zipfile.ZipFile(io.BytesIO(b"no"))
import pluggy; pluggy.PluginManager("x").add_hookspecs(object())
import dataclasses; dataclasses.fields(3)
import enum; enum.Enum("E", "a")("b")
import unittest.mock as m; m.Mock().assert_called()
import threading; threading.Lock().release()
raise KeyError("GPTModel()")
raise AssertionError
raise ExceptionGroup("several", [ValueError(1)])
"""
PIECES = UNRELATED.strip().splitlines()


def test_no_match_in_tracebacks_of_other_kinds():
    """Real ones, of Python, its library and what is installed here."""
    logs = []
    for piece in PIECES:
        try:
            exec(piece, {})
        except BaseException:
            logs.append(traceback.format_exc())
    assert len(logs) >= 30
    assert {log: found for log in logs if (found := diagnosed(log))} == {}
    assert diagnosed("".join(logs)) == []
    read = list(tracebacks.read(io.BytesIO("".join(logs).encode())))
    assert len(read) >= len(logs)


@pytest.mark.one_python
def test_memory_is_constant(trace):
    class Endless(io.RawIOBase):
        """A log of 10 MB: progress bars, long lines, many prefixes, tracebacks without an end."""

        left = 100
        parts = (
            b"step 1: loss 2.5 Error rate 0.1 " * 900 + b"\n",
            b"".join(b'[rank%d]: Traceback\n[rank%d]:   File "a.py", line 1, in f\n' % (n, n) for n in range(700)),
            b"x" * 20_000 + b'  File "b.py", line 2, in g\n' * 1000,
        )

        def readable(self):
            return True

        def readinto(self, room):
            self.left -= 1
            data = self.parts[self.left % 3][: len(room)] if self.left > 0 else b""
            room[: len(data)] = data
            return len(data)

    tracemalloc.start()
    for _ in tracebacks.read(io.BufferedReader(Endless(), 1 << 17)):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_the_command(trace, tmp_path, capsys, monkeypatch):
    log = tmp_path / "train.log"
    log.write_text("step 1\n" + prefixed(trace, "[rank1]: ") * 2)
    assert cli.main(["diagnose", str(log)]) == 1
    out = capsys.readouterr().out
    assert re.search(
        rf"^{BUG}: certain .exception, message and function match.; first at line \d ..rank1.:., 2 times$", out, re.M
    )
    assert f"`rlhf-patches explain {BUG}`" in out
    (patch,) = [patch for patch in plugin.rlhf_patches() if patch.name == BUG]
    assert f"\n    {patch.bug}. When: {patch.when}\n    repair: " in out, "and not what is right with the patch"
    assert patch.summary not in out
    assert cli.main(["diagnose", "--json", str(log)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["exceptions"], found["bugs"][0]["name"], found["bugs"][0]["times"]) == (2, BUG, 2)
    assert [found["bugs"][0][key] for key in ("harm", "bug", "when")] == [patch.harm, patch.bug, patch.when]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ValueError: 3\n")))
    assert cli.main(["diagnose"]) == 0
    assert capsys.readouterr().out.startswith("No known bug in 1 exception.")
    assert cli.main(["diagnose", str(tmp_path / "gone")]) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"exception": ""}, {"exception": "a.B"}, {"frames": "m:f"}, {"frames": ("f",)}],
    ids=lambda wrong: str(wrong),
)
def test_a_wrong_signature(wrong):
    with pytest.raises(DefinitionError, match="Signature"):
        Signature(**{"exception": "KeyError", **wrong})


def test_a_signature_without_a_text_is_not_specific():
    assert not Signature("KeyError").specific
    assert Signature("KeyError", "text").specific


class Lines(io.RawIOBase):
    """A log that is made as it is read."""

    def __init__(self, lines):
        self.lines, self.rest = iter(lines), b""

    def readable(self):
        return True

    def readinto(self, room):
        self.rest = self.rest or next(self.lines, b"")
        data, self.rest = self.rest[: len(room)], self.rest[len(room) :]
        room[: len(data)] = data
        return len(data)


@pytest.mark.one_python
def test_memory_is_bounded_as_a_whole(trace):
    """Many streams, each with many frames, each with long names; prefixes without a bound."""
    frame = b'(pid=%d) File "/%s.py", line 1, in %s\n'
    frames = (frame % (rank, b"%d" % number * 165, b"f" * 199) for rank in range(150) for number in range(100, 356))
    long = (b"ERROR " + b"x" * 190 + b"]") * 320
    prefixes = (long + b'[%d] File "a.py", line 1, in f\n' % number for number in range(600))
    tracemalloc.start()
    for lines in (frames, prefixes):
        read = tracebacks.read(io.BufferedReader(Lines(lines), 1 << 17))
        assert all(raised.cut == tracebacks.TAIL for raised in read)  # none has an end
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 28 * 2**20
        tracemalloc.reset_peak()
    tracemalloc.stop()
    # What came last is found, whatever came before it.
    many = "".join(f'[rank{rank}]: File "{"x" * 499}", line 1, in f\n' for rank in range(4500) for _ in range(6))
    assert diagnosed(many + prefixed(trace, "[rank1]: ")) == [(BUG, True)]


@pytest.mark.one_python
@pytest.mark.parametrize(
    "line",
    [
        "(pid=" + "1" * 65_000,
        "(" + "pid=1" * 13_000,
        "E [" + "1" * 65_000,
        "[" + "a" * 65_000 + "E",
        "ERROR " + "[" * 65_000,
        "1" * 65_000 + "E",
        "E" * 65_000 + "!",
        "E." * 32_000 + "!",
        " " * 65_000 + "E!",
        'File "' + "1" * 65_000,
        'File "a", line ' + "1" * 65_000 + "E",
        "\x1b[" * 32_000 + "E",
        "\x1b]" * 32_000 + "E",
        "\x1b[" + "1" * 65_000 + "é",
    ],
    ids=lambda line: ascii(line[:12]),
)
def test_no_line_takes_more_time_than_it_is_long(line):
    """The square of 65,000 is seconds, and a log has many lines: before there was a bound this did not end."""
    begin = "Traceback (most recent call last):\n"
    assert [one for one, sure in diagnosed(begin + f"{line}\n" * (400 // SHARE)) if sure] == []


def test_a_line_without_an_end(said):
    assert said("diagnose", "/dev/zero") == (
        2, "", "rlhf-patches: /dev/zero: line 1 has more than 256 MiB: expected a log, which is text\n",
    )  # fmt: skip
