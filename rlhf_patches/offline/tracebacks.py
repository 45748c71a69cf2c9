"""The exceptions in a training log of any size: of many ranks at once, coloured, behind the prefixes of launchers.

One pass, in constant memory: of each stream the frames since its last traceback began, and no more of them than a
traceback has.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

_LONGEST_LINE = 1 << 16  # bytes; of a longer one the beginning counts
_MOST_FRAMES = 256
_MOST_STREAMS = 4096
_LONGEST_MESSAGE = 2000
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# torchrun's [rank0]: and [default0]:, Ray's (Actor pid=1, ip=...), srun -l's 0:, vLLM's ERROR 01-02 [core.py:1]
_PREFIX = re.compile(
    r"(?:\[(?:rank|default|[\w.-]+/)?\d+\]:?|\([^()\n]*\bpid=\d+[^()\n]*\)|\d+:|(?:ERROR|WARNING|INFO)\s[^\]\n]*\])[ ]?"
)
_FRAME = re.compile(r'\s*(?:\|\s*)?File "([^"\n]+)", line \d+, in (\S+)')
_EXCEPTION = re.compile(r"(?:[|+ -]*)((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::\s?(.*))?$")
_LOUD = re.compile(r"(?:Error|Exception|Exit|Interrupt|Warning)$")
_BEGIN = "Traceback (most recent call last):"


class Frame(NamedTuple):
    """One line of a traceback."""

    file: str
    function: str


@dataclass(frozen=True)
class Raised:
    """An exception, as a log shows it.

    Attributes:
        exception: its type, without the module.
        message: the first line of its text.
        frames: those of its own traceback, outermost first; empty where only the last line is there.
        near: frames that the same stream has shown before, of tracebacks that may be interleaved with this one.
        line: its number in the log.
        stream: the prefix of its lines: the rank, or the actor.
    """

    exception: str
    message: str
    frames: tuple[Frame, ...]
    near: tuple[Frame, ...]
    line: int
    stream: str


@dataclass
class _Stream:
    active: bool = False
    own: deque[Frame] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    near: deque[Frame] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))


def read(log: BinaryIO) -> Iterator[Raised]:
    """Every exception in a log, in its order."""
    streams: OrderedDict[str, _Stream] = OrderedDict()
    active = 0
    for number, line in _lines(log):
        # Most lines of a log end here.
        if not active and b"Traceback" not in line and b'File "' not in line and b"E" not in line:
            continue
        text = _COLOUR.sub("", line.decode("utf-8", "replace")).rstrip("\r\n")
        prefix, text = _split(text)
        if not active and _BEGIN not in text and 'File "' not in text and not _may_be_loud(text):
            continue
        stream = streams.get(prefix) or _new(streams, prefix)
        was = stream.active
        frame = _FRAME.match(text)
        if text.endswith(_BEGIN):
            stream.active = True
            stream.own.clear()
        elif frame:
            stream.active = True
            stream.own.append(Frame(*frame.groups()))
            stream.near.append(stream.own[-1])
        else:
            raised = _raised(text, stream, number, prefix)
            if raised is not None:
                stream.active = False
                stream.own.clear()
                yield raised
        active += stream.active - was


def _lines(log: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := log.readline(_LONGEST_LINE):
        number += 1
        yield number, line
        while not line.endswith(b"\n") and (line := log.readline(_LONGEST_LINE)):
            pass


def _split(text: str) -> tuple[str, str]:
    """The prefixes of a line, and what follows them."""
    end = 0
    while found := _PREFIX.match(text, end):
        end = found.end()
    return text[:end].strip(), text[end:]


def _new(streams: OrderedDict[str, _Stream], prefix: str) -> _Stream:
    if len(streams) >= _MOST_STREAMS:
        streams.popitem(last=False)
    streams[prefix] = _Stream()
    return streams[prefix]


def _may_be_loud(text: str) -> bool:
    found = _EXCEPTION.match(text)
    return found is not None and _LOUD.search(found[1]) is not None


def _raised(text: str, stream: _Stream, number: int, prefix: str) -> Raised | None:
    """The exception that a line ends a traceback with, or names by itself."""
    found = _EXCEPTION.match(text)
    if found is None or not (_LOUD.search(found[1]) or (stream.active and stream.own and not text.startswith(" "))):
        return None
    name = found[1].rpartition(".")[2]
    message = (found[2] or "")[:_LONGEST_MESSAGE]
    return Raised(name, message, tuple(stream.own), tuple(stream.near), number, prefix)
