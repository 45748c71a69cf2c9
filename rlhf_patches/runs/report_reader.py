"""Reads the files of RLHF_PATCHES_REPORT.

Other users may have written them: values are checked, shortened to one line and limited, so that no content causes a
traceback, terminal control or large memory use.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Union

from ..definitions.listed import WATCH
from ..definitions.reached import Reached
from ..definitions.registry import BUILT_IN
from ..definitions.words import printable
from .processes import Effect
from .report_summary import NOT_IMPORTED, Recorded, Summary, Watched, summary

# Limits of the input. A real line has 8 KB, 25 patches and a few versions.
_LARGEST_FILE = 1 << 30
_LONGEST_LINE = 1 << 20
_LONGEST_REASON = 2000
_MOST_DIGITS = 20
_MOST_FIGURES = 20  # per watch
_MOST_ENTRIES = 2_000_000  # patches, versions and failures of all processes
_MOST_DISTINCT = 500_000  # distinct texts
_MOST_UNREADABLE = 100  # named lines

_Identity = tuple[str, int, Union[str, None]]


class ReportFileError(Exception):
    """A file cannot be read, or is not a report; the message names it and the reason."""


def summarize(files: Sequence[str]) -> Summary:
    """Read the files of one run.

    Raises:
        ReportFileError: a file cannot be read, is a pipe or a device, is empty, is not a report, or is too large.
    """
    processes: dict[_Identity, Recorded] = {}
    unreadable: list[str] = []
    more, entries = 0, 0
    known: dict[Any, Any] = {}  # thousands of processes have equal values
    for file in files:
        begun, ours = False, False
        for number, line in _lines(file):
            begun = True
            if entries > _MOST_ENTRIES or len(known) > _MOST_DISTINCT:
                raise ReportFileError(f"{file} is too large: expected a run of at most about 50,000 processes")
            try:
                identity, process = _process(_parsed(line), known)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                if len(unreadable) < _MOST_UNREADABLE:
                    unreadable.append(f"line {number} of {printable(file)} ({len(line)} bytes)")
                else:
                    more += 1
                continue
            ours = True
            # A later line of the process supersedes it; the process may run another program after an exec.
            processes[identity] = process
            entries += len(process.effects) + len(process.versions) + len(process.plugin_failures)
            entries += len(process.watched) + len(process.reached)
        if not begun:
            raise ReportFileError(
                f"{file} is empty: no process of the run has imported a framework with the patches on, or the run has "
                "just started. `rlhf-patches doctor` shows whether the site hook is active"
            )
        if not ours:
            raise ReportFileError(f"{file} has no line of RLHF_PATCHES_REPORT")
    unreadable += [f"{more} more lines"] if more else []
    return summary(tuple(processes.values()), tuple(unreadable))


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the non-blank lines of a file and their numbers; for a line that is too long, its beginning."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ReportFileError(f"cannot read {path}: it is a pipe or a device, expected a regular file")
            if status.st_size > _LARGEST_FILE:
                raise ReportFileError(f"cannot read {path}: it has more than {_LARGEST_FILE >> 20} MiB")
            number = 0
            while line := file.readline(_LONGEST_LINE + 1):
                number += 1
                rest = line
                while len(rest) > _LONGEST_LINE and not rest.endswith(b"\n"):
                    rest = file.readline(_LONGEST_LINE + 1)
                if line.strip():
                    yield number, line.rstrip(b"\n")
    except OSError as error:
        raise ReportFileError(f"cannot read {path}: {error.strerror}") from error


def _parsed(line: bytes) -> dict[str, Any]:
    if len(line) > _LONGEST_LINE:
        raise ValueError("too long")
    values = json.loads(line, parse_int=_integer)
    if not isinstance(values, dict):
        raise TypeError("expected an object")
    return values


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:  # the conversion is quadratic in their number
        raise ValueError("too many digits")
    return int(text)


def _process(line: dict[str, Any], known: dict[Any, Any]) -> tuple[_Identity, Recorded]:
    """Parse a line; raises one of several exceptions if it is not a report's."""

    def shared(value: Any) -> Any:
        return known.setdefault(value, value)

    versions = {shared(_text(name)): shared(_text(version)) for name, version in line.get("versions", {}).items()}
    for name, version in (("Python", line.get("python")), ("rlhf-patches", line.get("rlhf_patches"))):
        if version is not None:
            versions[name] = shared(_text(version))
    effects: dict[str, Effect] = {}
    plugins: dict[str, str] = {}
    watched: list[Watched] = []
    reached: dict[str, Reached] = {}
    for row in line["patches"]:
        if row.get("kind") == WATCH:  # processes may differ in watches
            watched += _watched(_text(row["name"]), row.get("observations", {}))
            continue
        name, status, plugin = _text(row["name"]), _text(row["status"]), _text(row.get("plugin", BUILT_IN))
        what = "unreviewed" if row.get("unreviewed") and status not in NOT_IMPORTED else status
        effects[shared(name)] = shared(Effect(what, reason=_text(row["reason"], _LONGEST_REASON)))
        if plugin != BUILT_IN:
            plugins[shared(name)] = shared(plugin)
        if "reached" in row:
            reached[shared(name)] = _reached(row["reached"])
    failures = tuple(
        shared(f"plugin {_text(row['plugin'])}: {_text(row['reason'], _LONGEST_REASON)}")
        for row in line.get("plugin_failures", ())
    )
    pid = line["pid"]
    if type(pid) is not int:
        raise TypeError("pid")
    process = Recorded(
        host=shared(_text(line["host"])),
        pid=pid,
        rank=_optional(line.get("rank")),
        world_size=_optional(line.get("world_size")),
        started=_optional(line.get("started")),
        ended=_optional(line.get("ended")),
        versions=versions,
        effects=effects,
        plugins=plugins,
        plugin_failures=failures,
        watched=tuple(watched),
        reached=reached,
        name=_optional(line.get("name")),
    )
    return (process.host, process.pid, _optional(line.get("process"))), process


def _watched(watch: str, observations: dict[str, Any]) -> Iterator[Watched]:
    for figure, observation in islice(observations.items(), _MOST_FIGURES):
        at, warning, values = (
            _text(observation["at"]),
            _text(observation.get("warning", ""), _LONGEST_REASON),
            observation["values"],
        )
        if type(values) is not int:
            raise TypeError("values")
        worst = observation["worst"]
        yield Watched(
            watch, _text(figure), float(worst[:_MOST_DIGITS] if isinstance(worst, str) else worst), at, values, warning
        )


def _reached(counts_read: dict[str, Any]) -> Reached:
    counts = [counts_read["calls"], counts_read.get("asked", 0), counts_read.get("held", 0)]
    if any(type(count) is not int or count < 0 for count in counts):
        raise TypeError("reached")
    calls, asked, held = counts
    least, most = (_number(counts_read.get(name)) for name in ("least", "most"))
    return Reached(calls, asked, held, least, most, _text(counts_read.get("measure", "")), "asked" in counts_read)


def _number(value: object) -> float | None:
    return None if value is None else float(value[:_MOST_DIGITS] if isinstance(value, str) else value)  # type: ignore[arg-type]


def _text(value: object, longest: int = 200) -> str:
    """Return text as one line, no longer than our own texts."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, not {type(value).__name__}")
    return printable(" ".join(value[:longest].split()))


def _optional(value: object) -> str | None:
    return None if value is None else _text(value)
