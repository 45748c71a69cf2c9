"""What every session of noxfile.py has: a line in the table at the end, and a temporary directory that it leaves clean.

nox runs sessions that are side by side in processes of their own: what they note lies in files that the first one
prints.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nox

from tests.harness import effort, failures
from tools import leavings
from tools.interpreters import ENGINE_PYTHONS, is_here

_CACHE = Path(__file__).parents[1] / ".cache" / "torchinductor"
_MOST_FAILURES = 10
_MOST_FILES = 10
_VARIABLE = "SESSION_TIMES"
_STARTED = time.monotonic()


def session(*, requires: Sequence[str] = (), **options: Any) -> Callable[[Callable[..., None]], Any]:
    """``nox.session`` for a function that is measured, and that fails where it leaves something of ours behind."""

    def decorate(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def measured(session: nox.Session) -> None:
            started, before, outcome = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN), "FAILED"
            folder = leavings.make()
            session.env.update(
                {
                    "TMPDIR": str(folder),
                    "TORCHINDUCTOR_CACHE_DIR": str(_CACHE),  # else in TMPDIR, and each session would compile again
                    failures.FILE: f"{_file()}.failures.{session.name}",
                    effort.OF_FILES: f"{_file()}.files.{session.name}",
                }
            )
            problems, left = [], []
            try:
                function(session)
                outcome = "passed"
            finally:
                processes = leavings.end_processes(folder)
                left = leavings.left(folder)
                problems = [f"still running: {command}" for command in processes]
                problems += [f"left behind: {name}" for name in left if leavings.is_ours(name)]
                if outcome == "passed" or not any(folder.iterdir()):
                    leavings.remove(folder)
                else:
                    session.warn(f"its temporary directory is kept: {folder}")
                outcome = "FAILED" if problems else outcome
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                _add("rows", [session.name, cpu, time.monotonic() - started, outcome, left])
                for problem in problems:
                    _note(f"{_file()}.failures.{session.name}", problem)
            if problems:
                session.error("; ".join(problems))

        return nox.session(requires=requires, **options)(measured)

    return decorate


def _file() -> str:
    """The path with which the names of all these files begin."""
    return os.environ[_VARIABLE]


def _add(name: str, row: list[Any]) -> None:
    _note(f"{_file()}.{name}", json.dumps(row))


def _note(file: str, line: str) -> None:
    with open(file, "a") as lines:
        lines.write(f"{line}\n")


def _rows(pattern: str) -> dict[str, list[str]]:
    """The lines of these files, by what follows the pattern's beginning in the name; they are removed."""
    path = Path(_file())
    found = {}
    for file in sorted(path.parent.glob(f"{path.name}.{pattern}")):
        found[file.name.removeprefix(f"{path.name}.").partition(".")[2]] = file.read_text().splitlines()
        file.unlink()
    return found


def _print_table() -> None:
    """Of each session, seconds of processor time and on the clock; the dearest test files; what has failed."""
    rows = [json.loads(line) for lines in _rows("rows").values() for line in lines]
    files, failed = _rows("files.*"), _rows("failures.*")
    Path(_file()).unlink()
    if rows:
        print(f"\n{'session':<18}{'CPU s':>8}{'clock s':>9}")
    for name, cpu, took, outcome, _ in rows:
        print(f"{name:<18}{cpu:>8.0f}{took:>9.0f}  {outcome}")
    if len(rows) > 1:
        print(f"{'in all':<18}{sum(row[1] for row in rows):>8.0f}{time.monotonic() - _STARTED:>9.0f}")
    _print_dearest(files)
    for name, *_, left in rows:
        if left:
            print(f"\n{name} has left in its temporary directory: {_counted(left)}")
    for name, lines in failed.items():
        print(f"\n{name}:", *lines[:_MOST_FAILURES], sep="\n  ")
    missing = [version for version in ENGINE_PYTHONS if not is_here(version)]
    if missing and any(row[0] == "pythons" for row in rows):  # `make test` takes the oldest alone
        print(f"NOT RUN: the engine's tests on Python {', '.join(missing)}, not found here")
    sys.stdout.flush()


def _print_dearest(files: dict[str, list[str]]) -> None:
    """The test files that took most, of all sessions."""
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for name, lines in files.items():
        for file, seconds in map(json.loads, lines):
            spent[name, file] += seconds
    dearest = sorted(spent.items(), key=lambda item: -item[1])[:_MOST_FILES]
    if dearest:
        print(f"\n{'the dearest files':<18}{'CPU s':>8}")
    for (name, file), seconds in dearest:
        print(f"{name:<18}{seconds:>8.0f}  {file}")


def _counted(names: list[str]) -> str:
    """Names that differ in their ends alone, as tempfile's do, are one."""
    kinds: dict[str, int] = defaultdict(int)
    for name in names:
        kinds[f"{name[:-8]}*" if len(name) > 8 else name] += 1
    return ", ".join(f"{number} x {kind}" if number > 1 else kind for kind, number in sorted(kinds.items()))


if _VARIABLE not in os.environ:
    _descriptor, os.environ[_VARIABLE] = tempfile.mkstemp(prefix="sessions-")
    os.close(_descriptor)
    atexit.register(_print_table)
