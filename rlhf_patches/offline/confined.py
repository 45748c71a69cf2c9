"""Read and judge an unknown release in a child process with limits.

`archive` refuses contents that no release has. The cost of Python's own parser and compiler, and of ast-grep, cannot be
bounded in advance: a kilobyte of source can take all memory or crash the interpreter. In that case the child ends, and
the command prints one line and continues.

The child is a fork: the plugins are already loaded and are not imported again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

from ..definitions.registry import PluginFailure, Registered
from ..definitions.status import PatchReport, Report, Status
from . import archive, evaluate
from .archive import Release
from .members import ReleaseError

CPU_SECONDS = 10
"""Limit; a framework's release takes 0.2 s, torch's wheel 0.7 s; on a slow machine five times that."""
MEMORY = 448 * 2**20
"""Limit of bytes beyond the child's initial memory. A framework's release takes 20 MiB, torch's wheel 60."""
SECONDS = 300
"""Wall-clock limit, for a network file system that does not respond at all."""
MAX_REASON = 2000
"""Characters of a sentence: some quote the release, whose version may have a million digits."""


@dataclass(frozen=True)
class Checked:
    """The results for a release.

    Attributes:
        report: the result of `evaluate.check`.
        is_patched: the result of `evaluate.is_patched`.
    """

    report: Report
    is_patched: bool


def check(path: str, registered: Sequence[Registered], failures: Iterable[PluginFailure] = ()) -> Checked:
    """Read the release at ``path`` and judge it.

    Raises:
        ReleaseError: it cannot be read, or not within the limits.
    """
    answer = ask(path, lambda release: _answer(release, registered))
    rows = (
        PatchReport(**{**row, "status": Status(row["status"]), "places": tuple(row["places"])})
        for row in answer["rows"]
    )
    return Checked(Report(tuple(rows), tuple(failures)), answer["is_patched"])


def ask(path: str, question: Callable[[Release], Any]) -> Any:
    """The result of ``question`` for the release at ``path``, in JSON values.

    Raises:
        ReleaseError: it cannot be read, or not within the limits.
    """
    end, other = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 3.12 warns about threads, which a plugin may have started
            child = os.fork()
    except OSError as error:
        os.close(end)
        os.close(other)
        raise ReleaseError(f"{path} is not read: no child process could be started ({error})") from error
    if not child:
        _child(end, other, path, question)
    os.close(other)
    with open(end, "rb") as stream:
        try:
            received = stream.read()
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            status = _wait(child)
    try:
        answer = json.loads(received)
    except ValueError:
        raise ReleaseError(f"{path} is not judged: reading it {_why(status)}; no known release does") from None
    if "error" in answer:
        raise ReleaseError(answer["error"])
    return answer["result"]


def _wait(child: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:  # this process inherited that the system reaps its children
        return None


def _why(status: int | None) -> str:
    if status == -signal.SIGXCPU:
        return f"took more than {CPU_SECONDS} seconds of processor time"
    if status == -signal.SIGALRM:
        return f"took more than {SECONDS} seconds"
    if status is not None and status < 0:
        return f"crashed Python ({signal.Signals(-status).name})"
    return "ended without a result"


def _child(parents: int, pipe: int, path: str, question: Callable[[Release], Any]) -> NoReturn:
    # Output other than the result would be a traceback.
    try:
        os.close(parents)
        # If standard output was closed, the pipe has its number.
        pipe = fcntl.fcntl(pipe, fcntl.F_DUPFD, 3)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(nowhere, standard)
        faulthandler.disable()  # it may write elsewhere
        _limit()
        with open(pipe, "wb") as stream:
            stream.write(json.dumps(_attempt(path, question)).encode())
    finally:
        os._exit(0)


def _answer(release: Release, registered: Sequence[Registered]) -> dict[str, Any]:
    report = evaluate.check(release, registered)
    rows = [asdict(replace(row, reason=short(row.reason), version=short(row.version))) for row in report]
    return {"rows": rows, "is_patched": evaluate.is_patched(release, registered)}


def _attempt(path: str, question: Callable[[Release], Any]) -> dict[str, Any]:
    try:
        return {"result": question(archive.open_release(path))}
    except ReleaseError as error:
        return {"error": short(str(error))}
    except MemoryError:
        much = f"more than {MEMORY // 2**20} MiB of memory"
        return {"error": f"{path} is not judged: reading it takes {much}; no known release does"}
    except Exception as error:
        return {"error": short(f"{path} is not judged: {type(error).__name__}: {error}")}


def short(text: str | None) -> Any:
    """Shorten a text that quotes a release, whose own texts may be endless."""
    if text is None or len(text) <= MAX_REASON:
        return text
    return f"{text[:MAX_REASON]}... ({len(text)} characters)"


def _limit() -> None:
    for number in (signal.SIGXCPU, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(SECONDS)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, CPU_SECONDS)
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
    except OSError:  # not Linux: the other limits must suffice
        return
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)


def _lower(limit: int, value: int) -> None:
    soft, hard = resource.getrlimit(limit)
    bounds = [value, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)]
    with contextlib.suppress(OSError, ValueError):  # the system may refuse a limit
        resource.setrlimit(limit, (min(bounds), hard))
