"""RLHF_PATCHES_REPORT: each process keeps one line of JSON about itself in a file that all processes of a run share.

A line that is written at exit only would be missing exactly where it matters: a process that is killed runs no exit
handler. That is a rank which NCCL's watchdog ends, or the kernel for want of memory, or torchrun because a peer has
died; and every worker of multiprocessing and Ray. So a process appends its line as soon as a patch has been applied,
refused or found not to be needed, and from then on rewrites it in place, whenever something changes and at exit.
``"ended"`` says whether that last time has come.

How many writers share one file, with no process in charge:

- A line is appended in one write with O_APPEND, so no two processes get the same place.
- It is filled up with spaces (JSON does not mind) to whole pages of 4,096 bytes, and only its own process writes there
  again. Pages, because a network file system may write back the whole page in which a byte has changed.
- Appending is done under flock, for network file systems, where O_APPEND alone can lose a line. No process waits for it
  long. Rewriting needs no lock: no other process writes to these pages.
- Before a line is rewritten, what was written last must still be there. Where the file was deleted, emptied or
  replaced, the line is appended anew; nothing is ever written to a place in a file that was not measured.
- A line that outgrows its room is appended anew, and blanks take its old place.

A variable can name the wrong file, and all users may be able to write to a folder. So nothing is appended to a file
that holds something else, no link is followed, and in a folder such as /tmp the file must be our user's, by this name
only.

Nothing here raises, and a failure is said once: a report is not worth a training run.
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
_SPARE = 1.25  # room for what an applied patch comes to say of itself
_TIMEOUT = 5.0  # seconds
_MODE = 0o644  # less the umask
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
# What every version's lines begin with, `_content` and json.dumps having put it in this order.
_BEGINNING = re.compile(rb'\{"host": "(?:[^"\\]|\\.)*", "pid": \d+, "')
_HEAD = 16 * 1024  # bytes that are looked at
# What a framework stands on; said when it is imported already, beside the versions of the frameworks themselves.
_ALSO = ("torch", "transformers", "transformer_engine", "deepspeed", "ray", "vllm", "sglang")
_LONGEST_TITLE = 100
_TITLE = re.compile(rb"[A-Za-z]{1,20}::[\w.:-]{1,60}")
_NAMED = re.compile(r"(?!MainProcess$|.*Process-\d)[\w.:-]{1,60}")  # and not as multiprocessing itself names one
_SETTLED = (Status.APPLIED, Status.OBSERVED, Status.UNAFFECTED, Status.REFUSED, Status.FAILED, Status.ADVICE)


def keep(path: str, report: Callable[[], Report]) -> Callable[[], None]:
    """Keep this process's line in the file from now on, and its children's; the first call of a process counts.

    Args:
        path: the file; it is made where it does not exist, its folder is not.
        report: what to write, asked for anew each time.

    Returns:
        what to call when something may have changed. It never raises.
    """
    global _line
    if _line is None:
        with contextlib.suppress(
            OSError
        ):  # the working directory is gone; then the path is no good, which is said later
            path = os.path.abspath(path)  # a script may change its working directory
        _line = _Line(path, report)
        atexit.register(_line.end)
        os.register_at_fork(after_in_child=_line.start_anew)
    return _line.update


def try_out(path: str) -> None:
    """Make the file where there is none, and find out whether a process could write its line there.

    Raises:
        OSError: it could not; the text says why.
    """
    os.close(_open(path))


@dataclass(frozen=True)
class _Written:
    """What was written last, and where."""

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
        """Write the line if there is something new to say. While every patch still waits, there is not."""
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
        except no_signal(Exception) as error:  # the callers are in the middle of a framework's import
            self._complain(error)

    def end(self) -> None:
        """Write the line for the last time, whatever there is to say."""
        error = _exception()
        self._ended = f"exception {type(error).__name__}" if error is not None else "exit"
        self.update()

    def start_anew(self) -> None:
        """In a forked child: the line is the parent's, and so may be the lock."""
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
        """multiprocessing's children skip atexit; they run finalizers, but drop those from before they began."""
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
                    said = f"cannot write the report (RLHF_PATCHES_REPORT={self.path}): {error}"
                    logger().warning("%s", printable(said))


_line: _Line | None = None


def _exception() -> BaseException | None:
    """What has ended this process, if it was an exception that nobody has caught."""
    # In a child of multiprocessing it is on its way; elsewhere Python has printed it and left it here. Where code is
    # typed in, that is only the last mistake.
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
    found = {row.distribution: row.version for row in report if row.version is not None}
    for name in _ALSO:
        try:
            found.setdefault(name, str(sys.modules[name].__version__))
        except no_signal(Exception):  # anything can be in sys.modules
            pass
    return found


def _process() -> tuple[str, str]:
    """When this process started, and what tells it from all others: a pid comes back, and containers share them.

    An exec keeps both, so that the line of the program before is recognised as superseded.
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
    """What an engine's process calls itself, as ps shows it: VLLM::EngineCore, sglang::scheduler, ray::Actor.

    It inherits the rank of the trainer that has started it, which alone would not tell it from that.
    """
    with contextlib.suppress(OSError), open(command_line, "rb") as file:
        found = _TITLE.match(file.read(_LONGEST_TITLE))
        if found is not None:
            return found[0].decode()
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
    """Open the file for appending, if it is one of ours or can become one."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _FLAGS, _MODE)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError("it is a symbolic link: name the file itself (its folder may be a link)") from None
        raise
    try:
        found, folder = os.fstat(file), os.stat(os.path.dirname(path) or ".")
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file")
        # What Linux calls protected_regular and protected_hardlinks, which are not switched on everywhere.
        public = stat.S_ISVTX | stat.S_IWOTH
        if folder.st_mode & public == public:
            if found.st_uid not in (os.geteuid(), folder.st_uid):
                raise OSError("it belongs to another user, and all users may put files into this folder")
            if found.st_nlink > 1:
                raise OSError("it has another name, too, and all users may put links into this folder")
        if not _ours(os.pread(file, _HEAD, 0)):
            raise OSError("it holds something else, to which nothing was added: name a file of its own")
        return file
    except BaseException:
        os.close(file)
        raise


def _ours(head: bytes) -> bool:
    """Whether a file that begins like this is a report, as far as that can be said.

    Its first lines may be blank, where one has moved, or torn, where a process was killed or the disk full.
    """
    for line in head.split(b"\n"):
        torn = b'{"host": "'.startswith(line[:10]) and not line.rstrip(b" ").endswith(b"}")
        if line.strip(b" ") and not torn:
            return _BEGINNING.match(line) is not None
    return True


def _append(path: str, data: bytes) -> int:
    """Append in one write; returns where it begins."""
    file = _open(path)
    try:
        found = os.fstat(file)
        with _locked(file):
            size = os.fstat(file).st_size
            # A process was killed in the middle of its line, which must not swallow ours.
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            written = os.write(file, b"\n" + data if torn else data)
            end = os.lseek(file, 0, os.SEEK_CUR)
            if written < len(data) + torn:
                _blank(path, found, end - written, written)
                raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes could be written")
            return end - len(data)
    finally:
        os.close(file)


def _blank(path: str, found: os.stat_result, offset: int, size: int) -> None:
    """Put blanks where a line was begun and could not be finished."""
    # Opened again: on Linux, a file opened with O_APPEND is appended to whatever offset pwrite is given.
    file = os.open(path, os.O_WRONLY | _FLAGS)
    try:
        if os.path.samestat(found, os.fstat(file)) and size:
            os.pwrite(file, _filled(b"", size), offset)
    finally:
        os.close(file)


def _rewrite(path: str, old: _Written, data: bytes) -> bool:
    """Put ``data`` in the place of what was written last; False when that is not there any more."""
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
            raise OSError(errno.ENOSPC, "the line could not be rewritten whole")
        return True
    finally:
        os.close(file)


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    """Hold the file's lock if it can be had soon; without it, O_APPEND still keeps lines apart on a local disk."""
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
                _timeout = 0.0  # another process holds it for good: wait no second time
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
    try:
        yield
    finally:
        if held:
            fcntl.flock(file, fcntl.LOCK_UN)


_timeout = _TIMEOUT
