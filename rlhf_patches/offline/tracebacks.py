"""The exceptions in a training log of any size: of many interleaved ranks, with colors and launchers' prefixes.

One pass in constant memory: each stream keeps the frames since its last traceback began, up to a limit; all streams
together keep at most `_MOST_CHARACTERS`. Every expression takes linear time.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from . import hangs, json_lines, log_versions
from .frames import Frame, Reader
from .json_lines import BEGIN
from .prefixes import Prefixes

_LONGEST_LINE = 1 << 16  # bytes; only the beginning of a longer line counts
_ENDLESS_LINE = 1 << 28  # bytes; no log has such a line, and a device would be read forever
_MOST_FRAMES = 256
_MOST_STREAMS = 4096
_MOST_CHARACTERS = 16 * 2**20  # of all kept frames; a thousand crashing ranks need half of it
_OF_A_FRAME = 200  # memory of a frame in addition to its characters
_LONGEST_PREFIX = 500
_LONGEST_MESSAGE = 2000
_COLOR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|^\^C")
_EXCEPTION = re.compile(r"(?:[|+ -]*)((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::\s?(.*))?$")
_LOUD = re.compile(r"(?:Error|Exception|Exit|Interrupt|Warning)$")
_RANK = re.compile(r"\[rank(\d{1,9})\]")
# IPython's, Colab's, rich's, and people's
_ELIDED = re.compile(
    r"[\s|│]*(?:\[?\.\.\. (?:skipping )?(?:hidden )?\d{1,9} (?:more |hidden |similar )*frames?\b|\d{1,9} frames$"
    r"|[\[(<]?(?:\.\.\.|…|snip)[\])>]?\s*[│|]?$)",
    re.IGNORECASE,
)
# rich's; and IPython's, which names the exception first
_OTHER_BEGIN = re.compile(
    r"(?:.{0,99}[─-] |(?:[A-Za-z_]\w{0,99}\.){0,9}[A-Z]\w{0,99}\s{2,99})Traceback \(most recent call last\)(?: [─-]|$)"
)
_LAZY = re.compile(r"Failed to import ([\w.]{1,200}) because of the following error")
_NEEDLES = (b"E", b"Traceback", b"File ", *hangs.NEEDLES)
_AFTER_FRAME = 2  # lines below a frame: its source, and the marks under it
_WITHIN = 2  # depth of JSON objects in a field of another


HEAD, FRAMES, TAIL = "its beginning is cut off", "frames are missing", "its end is cut off"
LAZY = "the frames of the failed import are missing"
"""The parts of a traceback that may be missing."""

NEAR = 40
"""The number of lines after a frame in which it may be the frame of an exception without a traceback."""


class LogError(Exception):
    """The input is not a log; the message has the reason."""


@dataclass(frozen=True)
class Raised:
    """An exception in a log.

    Attributes:
        exception: the type, without the module.
        message: the first line of the text.
        frames: the frames of its own traceback, outermost first; empty if the log has only the last line.
        near: earlier frames of the same stream, of tracebacks that may be interleaved with this one.
        line: the line number in the log.
        stream: the prefix of its lines: the rank, or the actor.
        cut: the missing part of the traceback; empty if none is known. ``HEAD``: the first line is missing; ``TAIL``:
            the log ends before the exception, so type and text are empty or cut off; ``FRAMES``.
        rank: the rank that raised it, if the prefix names one: ``rank 3``.
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


Event = Raised | hangs.Timeout | hangs.Stack | log_versions.Named
"""What a log shows."""


@dataclass
class _Stream:
    active: bool = False
    begun: bool = False  # with the first line of a traceback
    elided: bool = False
    boxed: bool = False  # by rich, which also wraps the exception's text
    reader: Reader = field(default_factory=Reader)
    lazy: list[Frame] = field(default_factory=list)  # of a lazy import, whose error is in the next line
    raised: str = ""  # the text of the last exception
    since: int = 0  # lines since the last frame
    last: int = 0  # the line number of the last frame
    own: deque[Frame] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    near: deque[Frame] = field(default_factory=lambda: deque(maxlen=_MOST_FRAMES))
    size: int = 0

    def add(self, frame: Frame) -> int:
        """Keep a frame; returns the growth of the stream."""
        gone = _size(self.near[0]) if len(self.near) == _MOST_FRAMES else 0
        self.own.append(frame)
        self.near.append(frame)  # the last of these are the stream's own
        self.size += _size(frame) - gone
        return _size(frame) - gone


def _size(frame: Frame) -> int:
    return len(frame.file) + len(frame.function) + _OF_A_FRAME


class _Streams:
    """The streams of a log, by prefix. If they are too many or too large, the oldest are dropped."""

    def __init__(self) -> None:
        self._by_prefix: OrderedDict[str, _Stream] = OrderedDict()
        self._size = 0
        self.active = 0

    def of(self, prefix: str) -> _Stream:
        """The stream of a prefix."""
        stream = self._by_prefix.get(prefix)
        if stream is None:
            if len(self._by_prefix) >= _MOST_STREAMS:
                self._forget()
            stream = self._by_prefix[prefix] = _Stream()
        return stream

    def add(self, stream: _Stream, frame: Frame) -> None:
        """Keep a frame."""
        self._size += stream.add(frame)
        while self._size > _MOST_CHARACTERS:
            self._forget()

    def begin(self, stream: _Stream) -> None:
        """A traceback begins in the stream. Earlier frames are another's, unless the two are interleaved."""
        if not stream.active:
            self._size -= stream.size
            stream.size = 0
            stream.near.clear()
        stream.begun, stream.elided, stream.boxed = True, False, False
        stream.own.clear()

    def unfinished(self) -> Iterator[tuple[str, _Stream]]:
        """The streams that end with a traceback."""
        for prefix, stream in self._by_prefix.items():
            if stream.active and stream.own and stream.since <= _AFTER_FRAME:
                yield prefix, stream

    def set_active(self, stream: _Stream, active: bool) -> None:
        """Record whether a traceback has begun and not ended."""
        self.active += active - stream.active
        stream.active = active

    def _forget(self) -> None:
        _, stream = self._by_prefix.popitem(last=False)
        self._size -= stream.size
        self.active -= stream.active


def read(log: BinaryIO) -> Iterator[Event]:
    """Every exception in a log, every sign of a hang, and the versions that its beginning names, in order.

    Raises:
        LogError: the log has an endless line.
    """
    streams, stacks, prefixes = _Streams(), hangs.Stacks(), Prefixes()
    for number, line in _lines(log):
        if number <= log_versions.MOST_LINES:
            yield from log_versions.named(line)
        # Skips most lines of a log.
        active = streams.active or stacks.active
        if not active and not any(needle in line for needle in _NEEDLES):
            continue
        for prefix, known, text in _texts(prefixes, line.decode("utf-8", "replace")):
            timeout = hangs.timeout(text, number, prefix, _rank(prefix))
            if timeout is not None:
                yield timeout
            yield from stacks.fed(text, number, prefix, _rank(prefix))
            if known != prefix and text.endswith(BEGIN):  # the lines below it may lack what is before it
                streams.begin(streams.of(known))
            yield from _fed(streams, prefix, text, number, line.endswith(b"\n"))
    yield from stacks.end()
    for prefix, stream in streams.unfinished():
        yield _shown(stream, "", "", stream.last, prefix, TAIL)


def _texts(prefixes: Prefixes, line: str, before: str = "", within: int = 0) -> Iterator[tuple[str, str, str]]:
    """The texts of a line, with its prefix: the line itself, or the lines in the fields of an object.

    Between the two is the part of the prefix that has a known shape.
    """
    prefix, known, text = prefixes.split(_COLOR.sub("", line).rstrip("\r\n"))
    prefix = f"{before} {prefix}".strip()[:_LONGEST_PREFIX]
    known = f"{before} {known}".strip()[:_LONGEST_PREFIX]
    unfolded = json_lines.unfolded(text) if text.startswith("{") and within < _WITHIN else None
    if unfolded is None:
        yield prefix, known, text[:_LONGEST_LINE]
        return
    rank, lines = unfolded
    for each in lines:
        yield from _texts(prefixes, each[:_LONGEST_LINE], f"{prefix} {rank}".strip(), within + 1)


def _fed(streams: _Streams, prefix: str, text: str, number: int, whole: bool) -> Iterator[Raised]:
    """The exceptions that a line completes."""
    if not streams.active and "Traceback" not in text and "File " not in text and not _may_be_loud(text):
        return
    stream = streams.of(prefix)
    frame = stream.reader.read(text, stream.active)
    if text.endswith(BEGIN) or _OTHER_BEGIN.match(text):
        streams.begin(stream)
        streams.set_active(stream, True)
        stream.boxed = not text.endswith(")") and not text.endswith(BEGIN)
    elif frame:
        streams.set_active(stream, True)
        stream.since, stream.last = 0, number
        streams.add(stream, frame)
    elif stream.lazy:
        yield from _fed_lazily(streams, stream, text, number, prefix)
    else:
        stream.since += 1
        stream.elided = stream.elided or _ELIDED.match(text) is not None
        raised = _raised(text, stream, number, prefix, whole)
        if raised is not None:
            module = _LAZY.match(raised.message)
            if module:
                stream.lazy = [*raised.frames, *_imported(module[1])]
            else:
                stream.raised = raised.message
            streams.set_active(stream, module is not None)
            stream.begun = stream.elided = False
            stream.own.clear()
            yield raised


def _fed_lazily(streams: _Streams, stream: _Stream, text: str, number: int, prefix: str) -> Iterator[Raised]:
    """The exception of a lazy import, whose text is in the line below that of the import's own."""
    module = _LAZY.match(text)
    if module:
        stream.lazy += _imported(module[1])
        return
    frames, stream.lazy = tuple(stream.lazy[-_MOST_FRAMES:]), []
    streams.set_active(stream, False)
    names = {"No module named": "ModuleNotFoundError", "cannot import name": "ImportError"}
    name = next((name for begin, name in names.items() if text.startswith(begin)), "")
    if name and text != stream.raised:  # or its traceback is above
        yield Raised(name, text[:_LONGEST_MESSAGE], frames, frames, number, prefix, LAZY, _rank(prefix))


def _imported(module: str) -> tuple[Frame, ...]:
    """The frames that the import of a module has in any case: the loader's and the module's."""
    return Frame(f"{module.partition('.')[0]}/import_utils.py", "_get_module"), Frame(
        f"{module.replace('.', '/')}.py", "<module>"
    )


def _lines(log: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := log.readline(_LONGEST_LINE):
        number += 1
        if b"{" in line[:_LONGEST_PREFIX] and not line.endswith(b"\n"):  # a truncated object is not parsed
            line += log.readline(json_lines.LONGEST - len(line))
        yield number, line
        size = 0
        while not line.endswith(b"\n") and (line := log.readline(_LONGEST_LINE)):
            size += len(line)
            if size > _ENDLESS_LINE:
                raise LogError(f"line {number} has more than {_ENDLESS_LINE >> 20} MiB: expected a log, which is text")


def _may_be_loud(text: str) -> bool:
    match = _EXCEPTION.match(text)
    return match is not None and _LOUD.search(match[1]) is not None


def _raised(text: str, stream: _Stream, number: int, prefix: str, whole: bool) -> Raised | None:
    """The exception in a line that ends a traceback or stands alone."""
    match = _EXCEPTION.match(text)
    if match is None or not (_LOUD.search(match[1]) or (stream.active and stream.own and not text.startswith(" "))):
        return None
    name = match[1].rpartition(".")[2]
    message = (match[2] or "")[:_LONGEST_MESSAGE]
    cut = (
        FRAMES
        if stream.elided
        else HEAD
        if stream.own and not stream.begun
        else ""
        if whole and not stream.boxed
        else TAIL
    )
    return _shown(stream, name, message, number, prefix, cut)


def _shown(stream: _Stream, name: str, message: str, number: int, prefix: str, cut: str) -> Raised:
    near = tuple(stream.near) if stream.own or number - stream.last <= NEAR else ()
    return Raised(name, message, tuple(stream.own), near, number, prefix, cut, _rank(prefix))


def _rank(prefix: str) -> str:
    match = _RANK.search(prefix)
    return f"rank {match[1]}" if match else ""
