"""Whether the processes of a run have the same patches in force: what is compared, and how a difference is told.

Plain data and no torch; `rlhf_patches.distributed` carries it between the ranks, `rlhf_patches.ray` from the actors.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from . import __version__, sources
from .ranks import ranks_text
from .reporting import PatchReport, Status
from .sources import NotFound, Unreadable
from .vocabulary import Patch

# What an import ends in is decided by version and code, so where one rank has imported it, the others will follow.
_DECIDED_BY_CODE = (Status.APPLIED, Status.REFUSED, Status.UNAFFECTED)
_MOST_PATCHES = 10
_MOST_HOSTS = 4
_MOST_CHARACTERS = 300  # of a reason


class VerifyError(RuntimeError):
    """Processes that belong together do not run the same patches, or could not be compared."""


@dataclass(frozen=True)
class Effect:
    """What a patch does in one process. ``code`` is a fingerprint of upstream's modules and of the patch."""

    status: str
    framework: str
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
    """One rank as it describes itself to the others. ``problem`` says why it cannot say what is in force."""

    rank: int
    host: str
    pid: int
    package: str
    effects: Mapping[str, Effect]
    problem: str | None = None

    @classmethod
    def own(cls, rank: int, effects: Callable[[], Mapping[str, Effect]]) -> Process:
        """This process. An exception of ``effects`` becomes its problem: the other ranks must not wait for it."""
        problem, found = None, {}
        try:
            found = dict(effects())
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        return cls(rank, socket.gethostname(), os.getpid(), __version__, found, problem)

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Process:
        """The inverse of `to_dict`."""
        effects = {name: Effect(**effect) for name, effect in values["effects"].items()}
        return cls(**{**values, "effects": effects})


# ------------------------------------------------------------------------------------- of one process


def effect(patch: Patch, row: PatchReport, texts: Mapping[str, str]) -> Effect:
    """What a patch does, or will do once its modules are imported. Nothing is imported, and nothing parsed.

    Args:
        patch: the patch.
        row: its row in the report.
        texts: if it is applied, the text that each of its modules had then.
    """
    framework = f"{row.distribution} {row.version or '(version unknown)'}"
    if row.status is Status.ABSENT and row.version is None:
        framework = f"no {row.distribution}"
    code = _fingerprint(patch, texts) if row.status in _DECIDED_BY_CODE or row.status is Status.PENDING else None
    reason = "" if row.status in (Status.APPLIED, Status.PENDING) else row.reason[:_MOST_CHARACTERS]
    return Effect(row.status.value, framework, code, reason)


def _fingerprint(patch: Patch, texts: Mapping[str, str]) -> str:
    """16 hex digits over the modules that are patched, the patch, and the modules of its implementations.

    Of text, not of code objects: a module that is not imported yet has none.
    """
    parts = [repr(patch.changes), f"assertions {'off' if sys.flags.optimize else 'on'}"]
    parts += [texts.get(module) or _text(module) for module in patch.modules]
    parts += [_text(path.partition(":")[0]) for path in patch.implementations]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:16]


def _text(module: str) -> str:
    try:
        return sources.read(sources.locate(module)).text
    except (NotFound, Unreadable) as error:
        return f"{type(error).__name__} {module}"


# ------------------------------------------------------------------------------------- between processes


Who = Callable[[list[Process]], str]


def differences(processes: Iterable[Process], who: Who | None = None) -> str | None:
    """What the processes do not agree on, as text of several lines; None if they agree.

    Args:
        processes: each with a rank of its own.
        who: what to call some of them; by default `where`.
    """
    who = who or where
    everyone = sorted(processes, key=lambda process: process.rank)
    sections = []
    unable = [process for process in everyone if process.problem is not None]
    if unable:
        sections.append(_section("these cannot tell their patches", unable, lambda p: str(p.problem), who))
    able = [process for process in everyone if process.problem is None]
    if len({process.package for process in able}) > 1:
        sections.append(_section("rlhf_patches", able, lambda process: process.package, who))
    names = dict.fromkeys(name for process in able for name in process.effects)
    sections += [text for name in names if (text := _difference(name, able, who)) is not None]
    if not sections:
        return None
    more = len(sections) - _MOST_PATCHES
    return "\n".join(sections[:_MOST_PATCHES] + ([f"and {more} more patches"] if more > 0 else []))


def _difference(name: str, processes: list[Process], who: Who) -> str | None:
    found = {process.rank: process.effects.get(name) for process in processes}
    present = [effect for effect in found.values() if effect is not None]
    acts = any(effect.in_force or effect.status == Status.FAILED.value for effect in present)
    # Where a patch acts nowhere, one that a rank has switched off, or does not know, makes no difference.
    compared = present if not acts else list(found.values())
    if not acts:
        compared = [effect for effect in present if effect.status != Status.DISABLED.value]
    decided = {(effect.framework, effect.code): effect.key for effect in present if effect.status in _DECIDED_BY_CODE}
    keys = set()
    for effect in compared:
        key = effect.key if effect else None
        if effect and effect.status == Status.PENDING.value:
            key = decided.get((effect.framework, effect.code), key)
        keys.add(key)
    if len(keys) < 2:
        return None
    several_codes = len({effect.code for effect in present if effect.in_force}) > 1
    imported = {effect.key: set[str]() for effect in present}
    for item in present:
        imported[item.key].add(item.status)

    def label(process: Process) -> str:
        effect = found[process.rank]
        if effect is None:
            return "not registered: no plugin there brings it"
        if not effect.in_force:
            return f"{effect.status} ({effect.reason})"
        code = f", code {effect.code}" if several_codes else ""
        return f"{' or '.join(sorted(imported[effect.key]))} ({effect.framework}{code})"

    return _section(name, processes, label, who)


def _section(title: str, processes: list[Process], label: Callable[[Process], str], who: Who) -> str:
    groups: dict[str, list[Process]] = {}
    for process in processes:
        groups.setdefault(label(process), []).append(process)
    return "\n".join([f"{title}:", *(f"  {who(members)}: {text}" for text, members in groups.items())])


def where(processes: list[Process]) -> str:
    """``ranks 0-6 on host-a, host-b`` or ``rank 7 on host-c (pid 4711)``."""
    hosts = list(dict.fromkeys(process.host for process in processes))
    listed = ", ".join(hosts[:_MOST_HOSTS])
    if len(hosts) > _MOST_HOSTS:
        listed += f" and {len(hosts) - _MOST_HOSTS} more hosts"
    pid = f" (pid {processes[0].pid})" if len(processes) == 1 else ""
    return f"{ranks_text([process.rank for process in processes])} on {listed}{pid}"
