"""RLHF_PATCHES_REPORT: each process keeps one line of JSON about itself in a file that all processes of a run share.

A line that is written only at exit would be missing for killed processes, which run no exit handler: a rank that NCCL's
watchdog, the kernel's out-of-memory killer or torchrun ends, and every worker of multiprocessing and Ray. So a process
appends its line as soon as a patch is applied, refused or unaffected, and then rewrites it in place on every change and
at exit. ``"ended"`` states whether the process has exited.

Many writers share one file without a coordinator:

- A line is appended in one write with O_APPEND, so no two processes get the same place.
- It is padded with spaces (valid JSON) to whole pages of 4,096 bytes, and only its own process rewrites them: a network
  file system may write back the whole page of a changed byte.
- Appending takes flock, for network file systems, where O_APPEND alone can lose a line. The wait for it is short.
  Rewriting needs no lock: no other process writes to these pages.
- Before a line is rewritten, the last written content must still be there. If the file was deleted, emptied or
  replaced, the line is appended again; nothing is ever written to an unchecked place in a file.
- A line that outgrows its space is appended again, and blanks replace the old line.

A variable can name the wrong file, and all users may be able to write to a folder. So nothing is appended to a file
with other content, no link is followed, and in a folder such as /tmp the file must belong to our user and have no other
name.

Nothing here raises, and a failure is logged once: a report must not stop a training run.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from .. import ranks
from .._version import __version__
from ..definitions.status import Report, Status
from ..definitions.words import printable
from ..engine.log import logger, speaks
from ..import_system import no_signal

_PAGE = 4096
_SPARE = 1.25  # space for later observations of applied patches
_TIMEOUT = 5.0  # seconds
_MODE = 0o644  # less the umask
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
# The beginning of every version's lines, in the order of `_content`.
_BEGINNING = re.compile(rb'\{"host": "(?:[^"\\]|\\.)*", "pid": \d+, "')
_HEAD = 16 * 1024  # bytes that are checked
# Dependencies of frameworks; reported if imported, together with the versions of the frameworks.
_ALSO = ("torch", "transformers", "transformer_engine", "deepspeed", "ray", "vllm", "sglang")
_LONGEST_TITLE = 100
_TITLE = re.compile(rb"[A-Za-z]{1,20}::[\w.:-]{1,60}")
_NAMED = re.compile(r"(?!MainProcess$|.*Process-\d)[\w.:-]{1,60}")  # not multiprocessing's own names
_SETTLED = (Status.APPLIED, Status.OBSERVED, Status.UNAFFECTED, Status.REFUSED, Status.FAILED, Status.ADVICE)


def keep(path: str, report: Callable[[], Report]) -> Callable[[], None]:
    """Keep the lines of this process and of its children in the file from now on; only the first call counts.

    Args:
        path: the file; it is created if it does not exist, its folder is not.
        report: returns the current report.

    Returns:
        the function to call after a possible change. It never raises.
    """
    global _line
    if _line is None:
        with contextlib.suppress(OSError):  # the working directory was deleted; a later write reports the invalid path
            path = os.path.abspath(path)  # a script may change its working directory
        _line = _Line(path, report)
        atexit.register(_line.end)
        os.register_at_fork(after_in_child=_line.start_anew)
    return _line.update


def try_out(path: str) -> None:
    """Create the file if there is none, and check that a process can write its line there.

    Raises:
        OSError: it cannot; the text gives the reason.
    """
    os.close(_open(path))


@dataclass(frozen=True)
class _Written:
    """The last written line, and its place."""

    offset: int
    data: bytes
    content: dict[str, Any]


class _Line:
    """The line of this process."""

    def __init__(self, path: str, report: Callable[[], Report]) -> None:
        self.path = path
        self._report = report
        self._lock = threading.RLock()
        self._written: _Written | None = None
        self._begun = False
        self._ended: str | None = None
        self._complained = False
        self._process: tuple[str, str] | None = None
        self._known_to_multiprocessing = False
        self._end_with_multiprocessing()

    def update(self) -> None:
        """Write the line if it has changed. Nothing is written while every patch is pending."""
        try:
            if not self._lock.acquire(timeout=_TIMEOUT):
                return  # another thread writes to a file system that does not answer
            try:
                report = self._report()
                self._begun = self._begun or _settled(report)
                if self._begun or self._ended:
                    self._write(report)
            finally:
                self._lock.release()
        except no_signal(Exception) as error:  # the callers run within a framework's import
            self._complain(error)

    def end(self) -> None:
        """Write the line for the last time, also if all patches are pending."""
        error = _exception()
        self._ended = f"exception {type(error).__name__}" if error is not None else "exit"
        self.update()

    def start_anew(self) -> None:
        """Reset in a forked child: the line and perhaps the lock belong to the parent."""
        self._lock = threading.RLock()
        self._written, self._ended, self._process = None, None, None
        self._end_with_multiprocessing()

    def _write(self, report: Report) -> None:
        self._process = self._process or _process()
        content = _content(report, self._ended, *self._process)
        if self._written is not None and self._written.content == content:
            return
        text = json.dumps({**content, "written": _iso(time.time())}, default=str).encode()
        old = self._written
        if old is not None and len(text) < len(old.data) and _rewrite(self.path, old, _filled(text, len(old.data))):
            self._written = _Written(old.offset, _filled(text, len(old.data)), content)
            return
        pages = -(-(int(len(text) * _SPARE) + 1) // _PAGE)
        data = _filled(text, pages * _PAGE)
        self._written = _Written(_append(self.path, data), data, content)
        if old is not None:
            _rewrite(self.path, old, _filled(b"", len(old.data)))

    def _end_with_multiprocessing(self) -> None:
        """Register a finalizer: multiprocessing's children skip atexit, and drop finalizers from before their start."""
        util = sys.modules.get("multiprocessing.util")
        if util is None or self._known_to_multiprocessing:
            return
        self._known_to_multiprocessing = True

        def at_the_end(line: _Line) -> None:
            util.Finalize(None, line.end, exitpriority=-1000)

        at_the_end(self)
        util.register_after_fork(self, at_the_end)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            with contextlib.suppress(Exception):  # at exit, standard error may be closed
                if speaks():
                    message = f"cannot write the report (RLHF_PATCHES_REPORT={self.path}): {error}"
                    logger().warning("%s", printable(message))


_line: _Line | None = None


def _exception() -> BaseException | None:
    """Return the uncaught exception that has ended this process, if any."""
    # In a child of multiprocessing it is still being handled; elsewhere Python has printed and stored it. In an
    # interactive interpreter it is only the last error.
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_value", None)
    return None if isinstance(error, SystemExit) and error.code in (None, 0) else error


def _settled(report: Report) -> bool:
    return bool(report.plugin_failures) or any(row.status in _SETTLED for row in report)


# ------------------------------------------------------------------------------------------ what is written


def _content(report: Report, ended: str | None, started: str, identity: str) -> dict[str, Any]:
    place = ranks.place()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": place.rank,
        "local_rank": place.local_rank,
        "world_size": place.world_size,
        "process": identity,
        "name": _name(),
        "started": started,
        "ended": ended,
        "rlhf_patches": __version__,
        "python": platform.python_version(),
        "versions": _versions(report),
        # The script only: arguments can hold keys and passwords.
        "command": sys.argv[:1],
        **report.to_dict(),
    }


def _versions(report: Report) -> dict[str, str]:
    versions = {row.distribution: row.version for row in report if row.version is not None}
    for name in _ALSO:
        try:
            versions.setdefault(name, str(sys.modules[name].__version__))
        except no_signal(Exception):  # anything can be in sys.modules
            pass
    return versions


def _process() -> tuple[str, str]:
    """Return when this process started, and a unique identity: pids are reused, and containers share them.

    An exec keeps both, so the line of the previous program is recognized as superseded.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])  # field 22, starttime
        namespace = os.stat("/proc/self/ns/pid").st_ino
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return _iso(time.time() - age), f"{namespace}-{os.getpid()}-{ticks}"
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux, or no /proc
        return _iso(time.time()), f"{os.getpid()}-{os.urandom(8).hex()}"


def _name(command_line: str = "/proc/self/cmdline") -> str | None:
    """Return the name of an inference engine's process, as in ps: VLLM::EngineCore, sglang::scheduler, ray::Actor.

    Such a process inherits its trainer's rank, so the rank alone does not identify it.
    """
    with contextlib.suppress(OSError), open(command_line, "rb") as file:
        title = _TITLE.match(file.read(_LONGEST_TITLE))
        if title is not None:
            return title[0].decode()
    process = sys.modules.get("multiprocessing.process")
    try:
        name = str(process.current_process().name) if process else ""
    except no_signal(Exception):  # half imported
        return None
    return name if _NAMED.fullmatch(name) else None


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _filled(text: bytes, size: int) -> bytes:
    return text.ljust(size - 1) + b"\n"


# ------------------------------------------------------------------------------------------ the file


def _open(path: str) -> int:
    """Open the file for appending, if it is a report or empty."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _FLAGS, _MODE)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError("it is a symbolic link: name the file itself (its folder may be a link)") from None
        raise
    try:
        status, folder = os.fstat(file), os.stat(os.path.dirname(path) or ".")
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        # Linux's protected_regular and protected_hardlinks, which are not enabled everywhere.
        public = stat.S_ISVTX | stat.S_IWOTH
        if folder.st_mode & public == public:
            if status.st_uid not in (os.geteuid(), folder.st_uid):
                raise OSError("it belongs to another user, and all users may put files into this folder")
            if status.st_nlink > 1:
                raise OSError("it has another hard link, and all users may put links into this folder")
        if not _ours(os.pread(file, _HEAD, 0)):
            raise OSError("it has other content and was not changed: name a separate file")
        return file
    except BaseException:
        os.close(file)
        raise


def _ours(head: bytes) -> bool:
    """Whether a file with this beginning is probably a report.

    Its first lines may be blank, if a line has moved, or incomplete, if a process was killed or the disk was full.
    """
    for line in head.split(b"\n"):
        torn = b'{"host": "'.startswith(line[:10]) and not line.rstrip(b" ").endswith(b"}")
        if line.strip(b" ") and not torn:
            return _BEGINNING.match(line) is not None
    return True


def _append(path: str, data: bytes) -> int:
    """Append in one write; return the offset of the line."""
    file = _open(path)
    try:
        status = os.fstat(file)
        with _locked(file):
            size = os.fstat(file).st_size
            # A killed process may leave an incomplete line, to which ours must not be appended.
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            written = os.write(file, b"\n" + data if torn else data)
            end = os.lseek(file, 0, os.SEEK_CUR)
            if written < len(data) + torn:
                _blank(path, status, end - written, written)
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be written")
            return end - len(data)
    finally:
        os.close(file)


def _blank(path: str, status: os.stat_result, offset: int, size: int) -> None:
    """Blank an incomplete line."""
    # Opened again: on Linux, pwrite to a file opened with O_APPEND appends at any offset.
    file = os.open(path, os.O_WRONLY | _FLAGS)
    try:
        if os.path.samestat(status, os.fstat(file)) and size:
            os.pwrite(file, _filled(b"", size), offset)
    finally:
        os.close(file)


def _rewrite(path: str, old: _Written, data: bytes) -> bool:
    """Replace the last written line by ``data``; return False if that line is no longer there."""
    try:
        file = os.open(path, os.O_RDWR | _FLAGS)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE, errno.ELOOP):
            return False
        raise
    try:
        if os.pread(file, len(old.data), old.offset) != old.data:
            return False
        if os.pwrite(file, data, old.offset) < len(data):
            raise OSError(errno.ENOSPC, "the line could not be rewritten completely")
        return True
    finally:
        os.close(file)


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    """Take the file's lock if it is soon available; without it, O_APPEND still separates lines on a local disk."""
    global _timeout
    deadline, pause = time.monotonic() + _timeout, 0.001
    held = False
    while not held:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except no_signal(OSError) as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                break  # a file system without locks
            if time.monotonic() > deadline:
                _timeout = 0.0  # another process never releases it: do not wait again
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
    try:
        yield
    finally:
        if held:
            try:
                fcntl.flock(file, fcntl.LOCK_UN)
            except no_signal(OSError):  # the line is written, and closing the file releases the lock
                pass


_timeout = _TIMEOUT
