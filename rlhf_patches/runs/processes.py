"""The description of one process of a run, and groups of equal processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..definitions.status import Status

PROBLEMS = (Status.REFUSED.value, Status.FAILED.value)


@dataclass(frozen=True)
class Effect:
    """The effect of a patch in one process. ``code`` is a fingerprint of upstream's modules and of the patch."""

    status: str
    framework: str = ""
    code: str | None = None
    reason: str = ""

    @property
    def in_force(self) -> bool:
        """Whether the function runs with the patch, or will after its import."""
        return self.status in (Status.APPLIED.value, Status.PENDING.value)

    @property
    def key(self) -> tuple[str | None, ...]:
        """The values that must be equal on all ranks. Whether a module is already imported does not matter."""
        if self.in_force:
            return ("in force", self.framework, self.code)
        # The framework of a disabled patch is not determined; a failed patch's reason names it.
        known = self.status in (Status.ABSENT.value, Status.UNAFFECTED.value, Status.REFUSED.value)
        return (self.status, self.framework) if known else (self.status,)


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        host: the host's name.
        pid: the process id on the host.
        rank: the launcher's rank; None if there is none.
        versions: versions of distributions, including rlhf-patches.
        effects: the effect of each patch.
        problem: why the process cannot report its patches.
    """

    host: str
    pid: int
    rank: str | None
    versions: Mapping[str, str]
    effects: Mapping[str, Effect]
    problem: str | None = None

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}" + (f" rank {self.rank}" if self.rank is not None else "")

    def identity(self) -> dict[str, Any]:
        """Return host, pid and rank as values that JSON can represent."""
        return {"host": self.host, "pid": self.pid, "rank": self.rank}


@dataclass(frozen=True)
class Group:
    """Processes with an equal state: ``what`` is a status, a version or a failure, ``reason`` that of one process."""

    what: str
    reason: str
    processes: tuple[Process, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON can represent."""
        return {"what": self.what, "reason": self.reason, "processes": [each.identity() for each in self.processes]}


def grouped(states: Iterable[tuple[str, str, Process]]) -> tuple[Group, ...]:
    """Group processes by state; refusals and failures also by reason, since each needs its own solution.

    Args:
        states: the state, the reason, and the process.

    Returns:
        the groups, in the order of their first processes.
    """
    groups: dict[tuple[str, str], list[Process]] = {}
    first: dict[tuple[str, str], str] = {}
    for what, reason, process in states:
        key = (what, reason if what in PROBLEMS else "")
        groups.setdefault(key, []).append(process)
        first.setdefault(key, reason)
    return tuple(Group(key[0], first[key], tuple(members)) for key, members in groups.items())
