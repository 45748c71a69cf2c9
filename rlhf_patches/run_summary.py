"""What became of patches in all processes of a run, from the files of RLHF_PATCHES_REPORT: who differs, and in what.

``pending`` and ``absent`` say that a process has not imported the framework (a launcher, a data loader, a driver). That
is no difference to processes that have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .ranks import ranks_text
from .reporting import Status

_NOT_IMPORTED = (Status.PENDING.value, Status.ABSENT.value)
_PROBLEMS = (Status.REFUSED.value, Status.FAILED.value)
_SHOWN = 8  # processes named in a line of text; JSON has all


class ReportFileError(Exception):
    """A file cannot be read, or is none of ours; the message says which and why."""


@dataclass(frozen=True)
class Process:
    """One process, as its line has it."""

    host: str
    pid: int
    rank: str | None
    world_size: str | None
    started: str | None
    ended: str | None
    versions: Mapping[str, str]
    """Of frameworks that are installed in its environment, of Python and of rlhf_patches."""
    patches: Mapping[str, tuple[str, str]]
    """Status and reason of each patch."""
    unread: frozenset[str]
    plugin_failures: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}" + (f" rank {self.rank}" if self.rank is not None else "")

    def to_dict(self) -> dict[str, Any]:
        """What identifies it."""
        return {"host": self.host, "pid": self.pid, "rank": self.rank}


@dataclass(frozen=True)
class Group:
    """Processes that say the same: ``what`` is a status, a version or a failure, ``reason`` one process's words."""

    what: str
    reason: str
    processes: tuple[Process, ...]

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        return {"what": self.what, "reason": self.reason, "processes": [each.to_dict() for each in self.processes]}


@dataclass(frozen=True)
class Subject:
    """A patch, or a distribution whose version was asked for: the groups, largest first."""

    name: str
    groups: tuple[Group, ...]
    not_imported: int = 0

    @property
    def differs(self) -> bool:
        """Whether processes do not agree."""
        return len({group.what for group in self.groups}) > 1

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        return {
            "name": self.name,
            "differs": self.differs,
            "not_imported": self.not_imported,
            "groups": [group.to_dict() for group in self.groups],
        }


@dataclass(frozen=True)
class Summary:
    """A run."""

    processes: tuple[Process, ...]
    unreadable: tuple[str, ...] = ()
    patches: tuple[Subject, ...] = field(default=())
    versions: tuple[Subject, ...] = field(default=())
    plugin_failures: tuple[Group, ...] = field(default=())
    missing_ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def not_ended(self) -> tuple[Process, ...]:
        """Processes that were killed, or still run."""
        return tuple(each for each in self.processes if each.ended is None)

    @property
    def problems(self) -> list[str]:
        """What somebody has to look at, a line each; none means that all processes are the same and all is well."""
        found = []
        for patch in self.patches:
            bad = [group for group in patch.groups if group.what in (*_PROBLEMS, "unread")]
            found += [f"{patch.name} {_count(group)} ({_names(group.processes)}): {group.reason}" for group in bad]
            found += [_deviation(patch)] if patch.differs else []
        found += [_deviation(version) for version in self.versions if version.differs]
        found += [f"{group.what} ({_names(group.processes)})" for group in self.plugin_failures]
        for size, ranks in self.missing_ranks.items():
            found.append(f"no line from {ranks_text(ranks)} of {size}")
        found += [f"unreadable: {line}" for line in self.unreadable]
        return found

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        return {
            "same": not self.problems,
            "problems": self.problems,
            "processes": len(self.processes),
            "hosts": dict(Counter(each.host for each in self.processes)),
            "not_ended": [each.to_dict() for each in self.not_ended],
            "missing_ranks": {str(size): list(ranks) for size, ranks in self.missing_ranks.items()},
            "unreadable": list(self.unreadable),
            "patches": [patch.to_dict() for patch in self.patches],
            "versions": [version.to_dict() for version in self.versions],
            "plugin_failures": [group.to_dict() for group in self.plugin_failures],
        }

    def __str__(self) -> str:
        hosts = Counter(each.host for each in self.processes)
        shown = ", ".join(f"{host} {count}" for host, count in sorted(hosts.items())[:_SHOWN])
        more = f" and {len(hosts) - _SHOWN} more hosts" if len(hosts) > _SHOWN else ""
        lines = [f"{_plural(len(self.processes), 'process', 'processes')} on {shown}{more}"]
        times = sorted(each.started for each in self.processes if each.started)
        if times:
            lines[0] += f"; started {times[0]}" + (f" to {times[-1]}" if times[-1] != times[0] else "")
        ended = len(self.processes) - len(self.not_ended)
        lines.append(f"{ended} ended in order")
        if self.not_ended:
            lines[-1] += f"; {len(self.not_ended)} were killed or still run: {_names(self.not_ended)}"
        lines += ["", *self._patch_lines(), ""]
        problems = self.problems
        if not problems:
            return "\n".join([*lines, "No differences, nothing refused or failed."])
        return "\n".join([*lines, f"{len(problems)} to look at:", *(f"- {text}" for text in problems)])

    def _patch_lines(self) -> list[str]:
        known = [patch for patch in self.patches if patch.groups]
        width = max((len(patch.name) for patch in known), default=0)
        lines = []
        for patch in known:
            said = [_count(group) for group in patch.groups]
            said += [f"not imported in {patch.not_imported}"] if patch.not_imported else []
            lines.append(f"{patch.name.ljust(width)}  {', '.join(said)}")
        nowhere = len(self.patches) - len(known)
        return lines + (
            [f"{_plural(nowhere, 'patch', 'patches')} of frameworks that no process imported"] * bool(nowhere)
        )


# ------------------------------------------------------------------------------------------ reading


def summarise(files: Sequence[str]) -> Summary:
    """Read the files of one run.

    Raises:
        ReportFileError: a file cannot be read, is empty, or has no line of ours.
    """
    processes: dict[tuple[str, int, Any], Process] = {}
    unreadable: list[str] = []
    for file in files:
        found = _read(file, unreadable)
        for identity, process in found:
            # What comes later is what the process said last; it may have become another program since (exec).
            processes[identity] = process
    return _summary(tuple(processes.values()), tuple(unreadable))


def _read(file: str, unreadable: list[str]) -> list[tuple[tuple[str, int, Any], Process]]:
    try:
        with open(file, "rb") as opened:
            data = opened.read()
    except OSError as error:
        raise ReportFileError(f"cannot read {file}: {error.strerror}") from error
    if not data.strip():
        raise ReportFileError(f"{file} is empty: no process has written to it yet")
    found, bad = [], []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(_process(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            bad.append(f"line {number} of {file} ({len(line)} bytes)")
    if not found:
        raise ReportFileError(f"{file} has no line that RLHF_PATCHES_REPORT could have written")
    unreadable += bad
    return found


def _process(line: dict[str, Any]) -> tuple[tuple[str, int, Any], Process]:
    patches = line["patches"]
    versions = {str(name): str(version) for name, version in line.get("versions", {}).items()}
    for name, version in (("Python", line.get("python")), ("rlhf-patches", line.get("rlhf_patches"))):
        if version is not None:
            versions[name] = str(version)
    process = Process(
        host=str(line["host"]),
        pid=int(line["pid"]),
        rank=_text(line.get("rank")),
        world_size=_text(line.get("world_size")),
        started=_text(line.get("started")),
        ended=_text(line.get("ended")),
        versions=versions,
        patches={str(row["name"]): (str(row["status"]), str(row["reason"])) for row in patches},
        unread=frozenset(str(row["name"]) for row in patches if row.get("unread")),
        plugin_failures=tuple(f"plugin {row['plugin']}: {row['reason']}" for row in line.get("plugin_failures", ())),
    )
    return (process.host, process.pid, _text(line.get("process"))), process


def _text(value: object) -> str | None:
    return None if value is None else str(value)


# ------------------------------------------------------------------------------------------ comparing


def _summary(processes: tuple[Process, ...], unreadable: tuple[str, ...]) -> Summary:
    return Summary(
        processes,
        unreadable,
        patches=tuple(_patch(name, processes) for name in _names_in(each.patches for each in processes)),
        versions=tuple(
            Subject(name, _groups((each.versions[name], "", each) for each in processes if name in each.versions))
            for name in _names_in(each.versions for each in processes)
        ),
        plugin_failures=_groups((text, "", each) for each in processes for text in each.plugin_failures),
        missing_ranks=_missing_ranks(processes),
    )


def _names_in(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _patch(name: str, processes: Sequence[Process]) -> Subject:
    said = []
    not_imported = 0
    for process in processes:
        status, reason = process.patches.get(name, (None, ""))
        if status in _NOT_IMPORTED:
            not_imported += 1
        elif status is not None:
            said.append(("unread" if name in process.unread else status, reason, process))
    return Subject(name, _groups(said), not_imported)


def _groups(said: Iterable[tuple[str, str, Process]]) -> tuple[Group, ...]:
    """By what is said; refusals and failures by their reason too, since each needs its own cure."""
    found: dict[tuple[str, str], list[Process]] = {}
    first: dict[tuple[str, str], str] = {}
    for what, reason, process in said:
        key = (what, reason if what in _PROBLEMS else "")
        found.setdefault(key, []).append(process)
        first.setdefault(key, reason)
    groups = [Group(key[0], first[key], tuple(members)) for key, members in found.items()]
    return tuple(sorted(groups, key=lambda group: -len(group.processes)))


def _missing_ranks(processes: Sequence[Process]) -> dict[int, tuple[int, ...]]:
    """Ranks of a world from which nothing was heard, by the world's size (a Ray job can have several worlds)."""
    worlds: dict[int, set[int]] = {}
    for process in processes:
        if (process.rank or "").isdecimal() and (process.world_size or "").isdecimal():
            worlds.setdefault(int(process.world_size or ""), set()).add(int(process.rank or ""))
    # A size that nobody can mean must not make us count up to it.
    missing = {size: tuple(sorted(set(range(min(size, 1_000_000))) - ranks)) for size, ranks in sorted(worlds.items())}
    return {size: ranks for size, ranks in missing.items() if ranks}


# ------------------------------------------------------------------------------------------ words


def _deviation(subject: Subject) -> str:
    """The majority, and who is not of it."""
    most, *others = subject.groups
    texts = []
    for group in others:
        if group.what != most.what:
            why = f" ({group.reason})" if group.reason and group.what not in _PROBLEMS else ""
            texts.append(f"{group.what} in {_names(group.processes)}{why}")
    return f"{subject.name} differs: {_count(most)}, but {'; '.join(texts)}"


def _count(group: Group) -> str:
    return f"{group.what} in {len(group.processes)}"


def _names(processes: Sequence[Process]) -> str:
    shown = ", ".join(str(each) for each in processes[:_SHOWN])
    return shown + (f" and {len(processes) - _SHOWN} more" if len(processes) > _SHOWN else "")


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
