"""The exceptions in a training log of any size: of many ranks at once, coloured, behind the prefixes of launchers.

One pass, in constant memory: of each stream the frames since its last traceback began, and no more of them than a
traceback has; of all streams together no more than `_MOST_CHARACTERS`. No expression here takes more time than a line
is long.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from . import hangs, json_lines
from .hangs import Frame
from .json_lines import BEGIN

_LONGEST_LINE = 1 << 16  # bytes; of a longer one the beginning counts
_ENDLESS_LINE = 1 << 28  # bytes; no log has one, and a device would be read for ever
_MOST_FRAMES = 256
_MOST_STREAMS = 4096
_MOST_CHARACTERS = 16 * 2**20  # of all frames that are kept: those of a thousand ranks that crash have half of it
_OF_A_FRAME = 200  # what one takes in memory beside its characters
_LONGEST_PATH = 500
_LONGEST_NAME = 200
_LONGEST_PREFIX = 500
_LONGEST_MESSAGE = 2000
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
# torchrun's [rank0]: and [default0]:, Ray's (Actor pid=1, ip=...), srun -l's 0:, vLLM's ERROR 01-02 [core.py:1]
_PREFIX = re.compile(
    r"(?:\[(?:rank|default|[\w.-]{1,99}/)?\d{1,9}\]:?|\([^()\n]{0,199}?\bpid=\d{1,20}\b[^()\n]{0,99}\)|\d{1,9}:"
    r"|(?:ERROR|WARNING|INFO)\s[^\]\n]{0,199}\])[ ]?"
)
_FRAME = re.compile(r'\s*(?:\|\s*)?File "([^"\n]+)", line \d+, in (\S+)')
_EXCEPTION = re.compile(r"(?:[|+ -]*)((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::\s?(.*))?$")
_LOUD = re.compile(r"(?:Error|Exception|Exit|Interrupt|Warning)$")
_RANK = re.compile(r"\[rank(\d{1,9})\]")
# IPython's, and those of tools that shorten tracebacks
_ELIDED = re.compile(
    r"[\s|]*\[?\.\.\. (?:skipping )?(?:hidden )?\d{1,9} (?:more |hidden |similar )*frames?\b", re.IGNORECASE
)
_NEEDLES = (b"E", b"Traceback", b"File ", *hangs.NEEDLES)
_AFTER_FRAME = 2  # lines that a frame has below it: its source, and the marks under that
_WITHIN = 2  # objects of JSON in a field of another


HEAD, FRAMES, TAIL = "its beginning is cut off", "frames are missing", "its end is cut off"
"""What of a traceback may be missing."""


class LogError(Exception):
    """What is read is no log; the message says why."""


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
        cut: what of its traceback is missing; empty where nothing is known to be. ``HEAD``: it was shown without its
            first line; ``TAIL``: the log ends before the exception, so type and text are empty or cut off; ``FRAMES``.
        rank: which rank has raised it, if the prefix tells: ``rank 3``.
        file: the name of the log, if it has one.
    """

    exception: str
    message: str
    frames: tuple[Frame, ...]
    near: tuple[Frame, ...]
    line: int
    stream: str
    cut: str = ""
    rank: str = ""
    file: str = ""


@dataclass
class _Stream:
    active: bool = False
    begun: bool = False  # with the line that a traceback begins with
    elided: bool = False
    since: int = 0  # lines since the last frame
    last: int = 0  # the number of that line
    own: deque[Frame] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    near: deque[Frame] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    size: int = 0

    def add(self, frame: Frame) -> int:
        """Keep a frame; returns by how much the stream is larger."""
        gone = _size(self.near[0]) if len(self.near) == _MOST_FRAMES else 0
        self.own.append(frame)
        self.near.append(frame)  # the last of which are its own
        self.size += _size(frame) - gone
        return _size(frame) - gone


def _size(frame: Frame) -> int:
    return len(frame.file) + len(frame.function) + _OF_A_FRAME


class _Streams:
    """The streams of a log, by prefix. Where they are too many, or too large, those that came first are forgotten."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, _Stream] = OrderedDict()
        self._size = 0
        self.active = 0

    def of(self, prefix: str) -> _Stream:
        """The stream of a prefix."""
        stream = self._found.get(prefix)
        if stream is None:
            if len(self._found) >= _MOST_STREAMS:
                self._forget()
            stream = self._found[prefix] = _Stream()
        return stream

    def add(self, stream: _Stream, frame: Frame) -> None:
        """Keep a frame."""
        self._size += stream.add(frame)
        while self._size > _MOST_CHARACTERS:
            self._forget()

    def unfinished(self) -> Iterator[tuple[str, _Stream]]:
        """Those in which a traceback was the last thing that was said."""
        for prefix, stream in self._found.items():
            if stream.active and stream.own and stream.since <= _AFTER_FRAME:
                yield prefix, stream

    def set_active(self, stream: _Stream, active: bool) -> None:
        """Note whether a traceback has begun and not ended."""
        self.active += active - stream.active
        stream.active = active

    def _forget(self) -> None:
        _, stream = self._found.popitem(last=False)
        self._size -= stream.size
        self.active -= stream.active


def read(log: BinaryIO) -> Iterator[Raised | hangs.Timeout | hangs.Stack]:
    """Every exception in a log, and every sign that a run stands still, in its order.

    Raises:
        LogError: it has a line without an end.
    """
    streams, stacks = _Streams(), hangs.Stacks()
    for number, line in _lines(log):
        # Most lines of a log end here.
        active = streams.active or stacks.active
        if not active and not any(needle in line for needle in _NEEDLES):
            continue
        for prefix, text in _texts(line.decode("utf-8", "replace")):
            timeout = hangs.timeout(text, number, prefix, _rank(prefix))
            if timeout is not None:
                yield timeout
            yield from stacks.fed(text, number, prefix, _rank(prefix))
            yield from _fed(streams, prefix, text, number, line.endswith(b"\n"))
    yield from stacks.end()
    for prefix, stream in streams.unfinished():
        yield _shown(stream, "", "", stream.last, prefix, TAIL)


def _texts(line: str, before: str = "", within: int = 0) -> Iterator[tuple[str, str]]:
    """What a line says, with its prefix: the line itself, or the lines in the fields of an object."""
    prefix, text = _split(_COLOUR.sub("", line).rstrip("\r\n"))
    prefix = f"{before} {prefix}".strip()[:_LONGEST_PREFIX]
    found = json_lines.unfolded(text) if text.startswith("{") and within < _WITHIN else None
    if found is None:
        yield prefix, text[:_LONGEST_LINE]
        return
    rank, lines = found
    for each in lines:
        yield from _texts(each[:_LONGEST_LINE], f"{prefix} {rank}".strip(), within + 1)


def _fed(streams: _Streams, prefix: str, text: str, number: int, whole: bool) -> Iterator[Raised]:
    """What a line ends."""
    if not streams.active and BEGIN not in text and 'File "' not in text and not _may_be_loud(text):
        return
    stream = streams.of(prefix)
    frame = _FRAME.match(text)
    if text.endswith(BEGIN):
        streams.set_active(stream, True)
        stream.begun, stream.elided = True, False
        stream.own.clear()
    elif frame:
        streams.set_active(stream, True)
        stream.since, stream.last = 0, number
        streams.add(stream, Frame(frame[1][-_LONGEST_PATH:], frame[2][:_LONGEST_NAME]))
    else:
        stream.since += 1
        stream.elided = stream.elided or _ELIDED.match(text) is not None
        raised = _raised(text, stream, number, prefix, whole)
        if raised is not None:
            streams.set_active(stream, False)
            stream.begun = stream.elided = False
            stream.own.clear()
            yield raised


def _lines(log: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := log.readline(_LONGEST_LINE):
        number += 1
        if b"{" in line[:_LONGEST_PREFIX] and not line.endswith(b"\n"):  # an object that is cut off is none
            line += log.readline(json_lines.LONGEST - len(line))
        yield number, line
        size = 0
        while not line.endswith(b"\n") and (line := log.readline(_LONGEST_LINE)):
            size += len(line)
            if size > _ENDLESS_LINE:
                raise LogError(f"line {number} has more than {_ENDLESS_LINE >> 20} MiB: expected a log, which is text")


def _split(text: str) -> tuple[str, str]:
    """The prefixes of a line, and what follows them."""
    end = 0
    while found := _PREFIX.match(text, end):
        end = found.end()
    return text[:end].strip(), text[end:]


def _may_be_loud(text: str) -> bool:
    found = _EXCEPTION.match(text)
    return found is not None and _LOUD.search(found[1]) is not None


def _raised(text: str, stream: _Stream, number: int, prefix: str, whole: bool) -> Raised | None:
    """The exception that a line ends a traceback with, or names by itself."""
    found = _EXCEPTION.match(text)
    if found is None or not (_LOUD.search(found[1]) or (stream.active and stream.own and not text.startswith(" "))):
        return None
    name = found[1].rpartition(".")[2]
    message = (found[2] or "")[:_LONGEST_MESSAGE]
    cut = FRAMES if stream.elided else HEAD if stream.own and not stream.begun else "" if whole else TAIL
    return _shown(stream, name, message, number, prefix, cut)


def _shown(stream: _Stream, name: str, message: str, number: int, prefix: str, cut: str) -> Raised:
    return Raised(name, message, tuple(stream.own), tuple(stream.near), number, prefix, cut, _rank(prefix))


def _rank(prefix: str) -> str:
    found = _RANK.search(prefix)
    return f"rank {found[1]}" if found else ""
