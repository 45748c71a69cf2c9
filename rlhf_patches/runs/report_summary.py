"""Summarizes the patches of all processes of a run, from the files of RLHF_PATCHES_REPORT, and their differences.

``pending`` and ``absent`` mean that a process has not imported the framework (a launcher, a data loader, a driver).
That does not count as a difference.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

from ..definitions.reached import Reached, in_all
from ..definitions.registry import credit
from ..definitions.status import Status
from ..definitions.words import finite, observed_text, plural
from ..ranks import ranks_text
from .processes import PROBLEMS, Group, Process, grouped

NOT_IMPORTED = (Status.PENDING.value, Status.ABSENT.value)
_SHOWN = 8  # processes named in a line of text; JSON has all
_MOST_DEVIATIONS = 50  # different versions and statuses in a line of text
_MOST_PROBLEMS = 1000
_MOST_RANKS = 100_000  # missing ranks in JSON
_NUMBER = re.compile("[0-9]{1,18}")


class Watched(NamedTuple):
    """A figure of a watch in one process: the worst value, where it occurred, of how many; and its warning, if any."""

    watch: str
    figure: str
    worst: float
    at: str
    values: int
    warning: str

    @property
    def seen(self) -> dict[str, Any]:
        """The observation without the warning."""
        return {"worst": finite(self.worst), "at": self.at, "values": self.values}


@dataclass(frozen=True, kw_only=True)
class Recorded(Process):
    """One process from its line, with versions of the installed frameworks, of Python and of rlhf-patches.

    Attributes:
        plugins: the plugins of patches that are not built-in.
        watched: the figures of watches.
        reached: the call counts by patch.
        name: the name of an inference engine's process; None for others.
    """

    world_size: str | None
    started: str | None
    ended: str | None
    plugins: Mapping[str, str]
    plugin_failures: tuple[str, ...]
    watched: tuple[Watched, ...] = ()
    reached: Mapping[str, Reached] = field(default_factory=dict)
    name: str | None = None

    def __str__(self) -> str:
        return super().__str__() + (f" {self.name}" if self.name else "")

    def identity(self) -> dict[str, Any]:
        """Add the name, if there is one."""
        return {**super().identity(), **({"name": self.name} if self.name else {})}


@dataclass(frozen=True)
class Subject:
    """A patch, or a distribution with its versions: the groups of processes, largest first."""

    name: str
    groups: tuple[Group, ...]
    not_imported: int = 0
    plugins: tuple[str, ...] = ()
    """The plugins of a patch that is not built-in."""

    @property
    def title(self) -> str:
        """Its name and plugin."""
        return self.name + (credit(", ".join(self.plugins[:_SHOWN])) if self.plugins else "")

    @property
    def differs(self) -> bool:
        """Whether processes differ."""
        return len({group.what for group in self.groups}) > 1

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        return {
            "name": self.name,
            "differs": self.differs,
            "not_imported": self.not_imported,
            "plugins": list(self.plugins),
            "groups": [group.to_dict() for group in self.groups],
        }


@dataclass(frozen=True)
class Summary:
    """A run."""

    processes: tuple[Recorded, ...]
    unreadable: tuple[str, ...] = ()
    patches: tuple[Subject, ...] = field(default=())
    versions: tuple[Subject, ...] = field(default=())
    plugin_failures: tuple[Group, ...] = field(default=())
    missing_ranks: Mapping[int, tuple[range, ...]] = field(default_factory=dict)

    @property
    def not_ended(self) -> tuple[Recorded, ...]:
        """Processes that were killed or still run."""
        return tuple(each for each in self.processes if each.ended is None)

    @property
    def by_exception(self) -> tuple[Recorded, ...]:
        """Processes that ended with an exception."""
        return tuple(each for each in self.processes if each.ended not in (None, "exit"))

    @property
    def warnings(self) -> tuple[Group, ...]:
        """The watches' warnings, with the processes."""
        return _largest_first(
            (f"{w.watch}: {w.warning}", "", each) for each in self.processes for w in each.watched if w.warning
        )

    @property
    def worst(self) -> Mapping[tuple[str, str], tuple[Watched, Recorded]]:
        """By watch and figure: the worst value of all processes, the number of all values, and the process."""
        by_figure: dict[tuple[str, str], tuple[Watched, Recorded]] = {}
        for process in self.processes:
            for one in process.watched:
                worst, whose = by_figure.get((one.watch, one.figure), (one._replace(values=0), process))
                values = worst.values + one.values
                if math.isnan(one.worst) or one.worst > worst.worst:
                    worst, whose = one, process
                by_figure[one.watch, one.figure] = worst._replace(values=values), whose
        return by_figure

    @property
    def reached(self) -> Mapping[str, tuple[Reached, int]]:
        """By patch: the call counts of all processes, and the number of processes with calls."""
        by_patch: dict[str, list[Reached]] = {}
        for process in self.processes:
            for name, one in process.reached.items():
                by_patch.setdefault(name, []).append(one)
        return {name: (in_all(each), sum(one.calls > 0 for one in each)) for name, each in by_patch.items()}

    @property
    def problems(self) -> list[str]:
        """The problems, one line each; empty if all processes are equal and nothing failed."""
        texts = list(islice(self._problems(), _MOST_PROBLEMS + 1))
        return texts if len(texts) <= _MOST_PROBLEMS else [*texts[:-1], "and more"]

    def _problems(self) -> Iterator[str]:
        for patch in self.patches:
            for group in patch.groups:
                if group.what in (*PROBLEMS, "unreviewed"):
                    yield f"{patch.title} {_count(group)} ({_names(group.processes)}): {group.reason}"
            if patch.differs:
                yield _deviation(patch)
        for warning in self.warnings:
            yield f"{warning.what} ({_names(warning.processes)})"
        yield from (_deviation(version) for version in self.versions if version.differs)
        yield from (f"{group.what} ({_names(group.processes)})" for group in self.plugin_failures)
        yield from (f"no line from {ranks_text(runs)} of {size}" for size, runs in self.missing_ranks.items())
        yield from (f"unreadable: {line}" for line in self.unreadable)

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        problems, missing, room = self.problems, {}, _MOST_RANKS
        for size, runs in self.missing_ranks.items():
            missing[str(size)] = list(islice(chain.from_iterable(runs), room))
            room -= len(missing[str(size)])
        return {
            "same": not problems,
            "problems": problems,
            "processes": len(self.processes),
            "hosts": dict(Counter(each.host for each in self.processes)),
            "not_ended": [each.identity() for each in self.not_ended],
            "by_exception": [{**each.identity(), "ended": each.ended} for each in self.by_exception],
            "missing_ranks": missing,
            "unreadable": list(self.unreadable),
            "patches": [patch.to_dict() for patch in self.patches],
            "versions": [version.to_dict() for version in self.versions],
            "plugin_failures": [group.to_dict() for group in self.plugin_failures],
            "reached": [
                {"patch": name, **reached.to_dict(), "processes": count}
                for name, (reached, count) in self.reached.items()
            ],
            "watched": [
                {"watch": worst.watch, "figure": worst.figure, **worst.seen, **whose.identity()}
                for worst, whose in self.worst.values()
            ],
        }

    def __str__(self) -> str:
        hosts = Counter(each.host for each in self.processes)
        shown = ", ".join(f"{count} on {host}" for host, count in sorted(hosts.items())[:_SHOWN])
        more = f" and {len(hosts) - _SHOWN} more hosts" if len(hosts) > _SHOWN else ""
        where = f" on {next(iter(hosts))}" if len(hosts) == 1 else f": {shown}{more}"
        lines = [f"{plural(len(self.processes), 'process', 'processes')}{where}"]
        times = sorted(each.started for each in self.processes if each.started)
        if times:
            lines[0] += f"; started {times[0]}" + (f" to {times[-1]}" if times[-1] != times[0] else "")
        ended = len(self.processes) - len(self.not_ended) - len(self.by_exception)
        lines.append(f"{ended} exited normally")
        if self.by_exception:
            kinds = ", ".join(dict.fromkeys((each.ended or "").partition(" ")[2] for each in self.by_exception))
            lines[-1] += f"; {len(self.by_exception)} by an exception ({kinds}): {_names(self.by_exception)}"
        if self.not_ended:
            were = plural(len(self.not_ended), "was killed or still runs", "were killed or still run")
            lines[-1] += f"; {were}: {_names(self.not_ended)}"
        problems = self.problems
        findings = [f"{plural(len(problems), 'problem')}:", *(f"- {text}" for text in problems)] if problems else []
        findings = findings or ["No differences, nothing refused or failed."]
        lines += ["", *findings, "", *self._reached_lines(), *self._watched_lines(), *self._patch_lines()]
        return "\n".join(lines)

    def _reached_lines(self) -> list[str]:
        """Return the call counts; for a killed process, those of its last line."""
        reached = self.reached
        applied = {each.name for each in self.patches if {group.what for group in each.groups} == {"applied"}}
        lines = [
            f"{name}: {one.text(ended=not self.not_ended)}{', repaired' if one.held and name in applied else ''}"
            f" ({plural(count, 'process', 'processes')})"
            for name, (one, count) in reached.items()
            if one.calls
        ]
        never = [name for name, (one, _) in reached.items() if not one.calls]
        lines += [f"never called: {', '.join(never)}"] if never else []
        if lines and self.not_ended:
            lines.append("for processes that were killed or still run, the counts are from their last lines")
        return [*lines, ""] if lines else []

    def _watched_lines(self) -> list[str]:
        lines = [
            f"{worst.watch}, {worst.figure}: {observed_text(worst.seen)} ({whose})"
            for worst, whose in self.worst.values()
        ]
        return [*lines, ""] if lines else []

    def _patch_lines(self) -> list[str]:
        unaffected = [p for p in self.patches if p.groups and all(g.what == "unaffected" for g in p.groups)]
        known = [patch for patch in self.patches if patch.groups and patch not in unaffected]
        width = min(max((len(patch.title) for patch in known), default=0), 80)
        lines = []
        for patch in known:
            counts = [_count(group) for group in patch.groups]
            counts += [f"not imported in {patch.not_imported}"] if patch.not_imported else []
            lines.append(f"{patch.title.ljust(width)}  {', '.join(counts)}")
        nowhere = len(self.patches) - len(known) - len(unaffected)
        for count, what in ((len(unaffected), "for other releases"), (nowhere, "for modules that no process imported")):
            lines += [f"{plural(count, 'patch', 'patches')} {what}"] * bool(count)
        return lines


def summary(processes: tuple[Recorded, ...], unreadable: tuple[str, ...] = ()) -> Summary:
    """Compare all processes."""
    patches: dict[str, list[_State]] = {}
    not_imported: Counter[str] = Counter()
    plugins: dict[str, dict[str, None]] = {}
    versions: dict[str, list[_State]] = {}
    for process in processes:
        for name, effect in process.effects.items():
            states = patches.setdefault(name, [])
            if effect.status in NOT_IMPORTED:
                not_imported[name] += 1
            else:
                states.append((effect.status, effect.reason, process))
        for name, plugin in process.plugins.items():
            plugins.setdefault(name, {})[plugin] = None
        for name, version in process.versions.items():
            versions.setdefault(name, []).append((version, "", process))
    return Summary(
        processes,
        unreadable,
        patches=tuple(
            Subject(name, _largest_first(states), not_imported[name], tuple(plugins.get(name, ())))
            for name, states in patches.items()
        ),
        versions=tuple(Subject(name, _largest_first(states)) for name, states in versions.items()),
        plugin_failures=_largest_first((text, "", each) for each in processes for text in each.plugin_failures),
        missing_ranks=_missing_ranks(processes),
    )


_State = tuple[str, str, Process]


def _largest_first(states: Iterable[_State]) -> tuple[Group, ...]:
    return tuple(sorted(grouped(states), key=lambda group: -len(group.processes)))


def _missing_ranks(processes: Sequence[Recorded]) -> dict[int, tuple[range, ...]]:
    """Return the ranks without a line, by world size (a Ray job can have several worlds)."""
    worlds: dict[int, set[int]] = {}
    for process in processes:
        if _NUMBER.fullmatch(process.rank or "") and _NUMBER.fullmatch(process.world_size or ""):
            worlds.setdefault(int(process.world_size or ""), set()).add(int(process.rank or ""))
    # As ranges: an impossible size must not be enumerated.
    missing = {}
    for size, ranks in sorted(worlds.items()):
        edges = [-1, *sorted(rank for rank in ranks if rank < size), size]
        runs = tuple(range(low + 1, high) for low, high in pairwise(edges) if low + 1 < high)
        if runs:
            missing[size] = runs
    return missing


def _deviation(subject: Subject) -> str:
    """Return the majority, and the processes that differ from it."""
    most, *others = subject.groups
    texts: list[str] = []
    for group in others:
        if group.what != most.what:
            why = f" ({group.reason})" if group.reason and group.what not in PROBLEMS else ""
            texts.append(f"{group.what} in {_names(group.processes)}{why}")
        if len(texts) == _MOST_DEVIATIONS:
            texts.append("and more")
            break
    share = plural(len(most.processes), "process", "processes")
    return f"{subject.title} differs: {most.what} in {share}, but {'; '.join(texts)}"


def _count(group: Group) -> str:
    return f"{group.what} in {len(group.processes)}"


def _names(processes: Sequence[Process]) -> str:
    shown = ", ".join(str(each) for each in processes[:_SHOWN])
    return shown + (f" and {len(processes) - _SHOWN} more" if len(processes) > _SHOWN else "")
