"""One process of a run, as it describes itself, and which of them say the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..definitions.status import Status

PROBLEMS = (Status.REFUSED.value, Status.FAILED.value)


@dataclass(frozen=True)
class Effect:
    """What a patch does in one process. ``code`` is a fingerprint of upstream's modules and of the patch."""

    status: str
    framework: str = ""
    code: str | None = None
    reason: str = ""

    @property
    def in_force(self) -> bool:
        """Whether the function runs with the patch, or will from its import on."""
        return self.status in (Status.APPLIED.value, Status.PENDING.value)

    @property
    def key(self) -> tuple[str | None, ...]:
        """What has to be equal on all ranks. It does not matter whether a module has been imported already."""
        if self.in_force:
            return ("in force", self.framework, self.code)
        # What a disabled patch's framework is has not been looked at; a failed one's reason names it.
        known = self.status in (Status.ABSENT.value, Status.UNAFFECTED.value, Status.REFUSED.value)
        return (self.status, self.framework) if known else (self.status,)


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        host: its name.
        pid: its process id there.
        rank: as the launcher has it; None where there is none.
        versions: of distributions, rlhf-patches among them.
        effects: what each patch does there.
        problem: why it cannot say what is in force.
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
        """Host, pid and rank, in values that JSON has."""
        return {"host": self.host, "pid": self.pid, "rank": self.rank}


@dataclass(frozen=True)
class Group:
    """Processes that say the same: ``what`` is a status, a version or a failure, ``reason`` one process's words."""

    what: str
    reason: str
    processes: tuple[Process, ...]

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        return {"what": self.what, "reason": self.reason, "processes": [each.identity() for each in self.processes]}


def grouped(said: Iterable[tuple[str, str, Process]]) -> tuple[Group, ...]:
    """By what is said; refusals and failures by their reason too, since each needs its own cure.

    Args:
        said: what, the reason, and the process that says it.

    Returns:
        the groups, in the order of their first processes.
    """
    found: dict[tuple[str, str], list[Process]] = {}
    first: dict[tuple[str, str], str] = {}
    for what, reason, process in said:
        key = (what, reason if what in PROBLEMS else "")
        found.setdefault(key, []).append(process)
        first.setdefault(key, reason)
    return tuple(Group(key[0], first[key], tuple(members)) for key, members in found.items())
