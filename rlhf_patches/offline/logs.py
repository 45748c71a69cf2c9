"""The logs that a user names: files, folders, standard input; compressed or not.

Each log is read as a stream, one after the other. In a folder only possible logs are read. Nothing is unpickled.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import BinaryIO, cast

from . import inputs, tracebacks
from .log_versions import Named

_MOST_FILES = 100_000
_GZIP = b"\x1f\x8b"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_LOOK = 4096  # the first bytes, which contain a NUL if the file is not text
_IS_PICKLE = "a pickle, as PyTorch's flight recorder writes: not read, because reading a pickle runs its code"
_RANK = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_TORCHRUN = re.compile(r"(?:^|/)attempt_\d{1,9}/(\d{1,9})/[^/]*$")


def rank_of(path: str) -> str:
    """The rank that wrote a file, from its path: ``rank3.log``, or torchrun's ``attempt_0/3/stderr.log``."""
    path = path.replace(os.sep, "/")
    local = _TORCHRUN.search(path)
    if local:
        return f"local rank {local[1]}"
    named = _RANK.findall(path)
    return f"rank {named[-1]}" if named else ""


@dataclass
class Logs:
    """The logs that a user names; each is read once.

    Attributes:
        paths: files, folders, and ``-`` for standard input.
        several: whether there may be more than one file, so that each finding needs its file's name.
        problems: messages about files that could not be read, or not to their end.
        left_out: messages about files in folders that are not logs.
        read: the number of files that were read.
    """

    paths: Sequence[str]
    several: bool = False
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    read: int = 0

    def __iter__(self) -> Iterator[tracebacks.Event]:
        for path in self.paths:
            folder = path != "-" and os.path.isdir(path)
            self.several = self.several or folder or len(self.paths) > 1
            for file in self._files(path) if folder else (path,):
                yield from self._exceptions(file, in_folder=folder)

    def _files(self, folder: str) -> Iterator[str]:
        """The regular files of a folder and its subfolders, in order; links are not followed."""
        waiting, count = [folder], 0
        while waiting:
            here = waiting.pop()
            try:
                with os.scandir(here) as entries:
                    children = sorted(entries, key=lambda entry: entry.name)
            except OSError as error:
                self.problems.append(f"cannot read {here}: {error.strerror or error}")
                continue
            waiting += [entry.path for entry in reversed(children) if entry.is_dir(follow_symlinks=False)]
            for entry in children:
                if not entry.is_file(follow_symlinks=False):
                    continue
                count += 1
                if count > _MOST_FILES:
                    self.problems.append(f"{folder} has more than {_MOST_FILES:,} files: name those that are logs")
                    return
                yield entry.path

    def _exceptions(self, path: str, in_folder: bool) -> Iterator[tracebacks.Event]:
        what = "standard input" if path == "-" else path
        try:
            with _opened(path) as stream:
                reason = _no_log(stream, in_folder)
                if reason:
                    (self.left_out if in_folder else self.problems).append(f"{what} is {reason}")
                    return
                self.read += 1
                for event in tracebacks.read(_plain(stream)):
                    if isinstance(event, Named):
                        yield event
                    else:
                        yield replace(event, file=what, rank=event.rank or rank_of(path))
        except OSError as error:  # includes errors of gzip
            self.problems.append(f"cannot read {what}: {error.strerror or error}")
        except (EOFError, zlib.error) as error:  # compressed data is cut off or damaged
            self.problems.append(f"{what} was not read to its end: {error}")
        except ValueError as error:  # a NUL in the path
            self.problems.append(f"cannot read {what!r}: {error}")
        except tracebacks.LogError as error:
            self.problems.append(f"{what}: {error}")


def _opened(path: str) -> io.BufferedReader:
    if path != "-":
        return open(path, "rb")
    # A separate reader, whose close does not close standard input.
    return io.BufferedReader(_Passed(inputs.standard_input()))


class _Passed(io.RawIOBase):
    """A reader of another stream, which stays open."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, room: memoryview) -> int:  # type: ignore[override]
        data = getattr(self._stream, "read1", self._stream.read)(len(room))
        room[: len(data)] = data
        return len(data)


def _no_log(stream: io.BufferedReader, in_folder: bool) -> str:
    """Why the stream is not a log; empty if it may be one."""
    start = stream.peek(_LOOK)[:_LOOK]
    if _PICKLE.match(start):
        return _IS_PICKLE
    # A log may contain any bytes (a file that was truncated while being written begins with NULs), but a folder may
    # also contain checkpoints.
    return "not text" if in_folder and b"\0" in start and not start.startswith(_GZIP) else ""


def _plain(stream: io.BufferedReader) -> BinaryIO:
    """The stream, decompressed while reading if it is compressed."""
    return cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if stream.peek(2).startswith(_GZIP) else stream
