"""Compares the patches that are in force in running processes, and describes the differences.

It uses plain data and no torch; `process_group` exchanges it between ranks, `rlhf_patches.ray` gets it from actors.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from .. import settings
from .._version import __version__
from ..definitions.bug import KnownBug
from ..definitions.listed import PATCH, Listed
from ..definitions.status import PatchReport, Status
from ..engine.engine import Engine
from ..guards import locating
from ..guards.places import NotFound, Unreadable
from ..import_system import no_signal
from ..ranks import ranks_text
from .processes import Effect, Process, grouped

# Version and code decide the outcome of an import, so the others follow a rank that has imported the module.
_DECIDED_BY_CODE = (Status.APPLIED, Status.REFUSED, Status.UNAFFECTED)
_SWITCHED_OFF = (Status.DISABLED.value, Status.INACTIVE.value)
_MOST_PATCHES = 10
_MOST_HOSTS = 4
_MOST_CHARACTERS = 300  # of a reason


class VerifyError(RuntimeError):
    """Processes of one run have different patches, or could not be compared."""


# ------------------------------------------------------------------------------------- of one process


def own_process(rank: int | None, engine: Engine) -> Process:
    """Describe this process. An exception of the engine becomes its problem: the other ranks must not wait."""
    problem = None
    own_effects: dict[str, Effect] = {}
    try:
        own_effects = effects(engine)
    except no_signal(Exception) as error:
        problem = f"{type(error).__name__}: {error}"
    name = None if rank is None else str(rank)
    return Process(socket.gethostname(), os.getpid(), name, {"rlhf-patches": __version__}, own_effects, problem)


def to_dict(process: Process) -> dict[str, Any]:
    """Return values that JSON can represent."""
    return asdict(process)


def from_dict(values: Mapping[str, Any]) -> Process:
    """Invert `to_dict`; other keys are ignored."""
    effects = {name: Effect(**effect) for name, effect in values["effects"].items()}
    return Process(**{**{each.name: values[each.name] for each in fields(Process)}, "effects": effects})


def effects(engine: Engine) -> dict[str, Effect]:
    """Return what every patch does in this process, or will do once its modules are imported, for the comparison.

    No module of a framework is imported, and nothing is changed. An advice and a watch change nothing, so they are
    left out.
    """
    carried = (each for each in engine.carried() if each[0].kind == PATCH)
    by_name = {patch.name: effect(patch, row, texts) for patch, row, texts in carried}
    if not settings.truth("OBSERVE"):
        return by_name
    # A pending patch will be observed on import, as on a rank that has imported it.
    observed = Effect(Status.OBSERVED.value)
    alike = (Status.PENDING.value, observed.status)
    return {name: observed if each.status in alike else each for name, each in by_name.items()}


def effect(patch: KnownBug | Listed, row: PatchReport, texts: Mapping[str, str]) -> Effect:
    """Return what a patch does, or will do once its modules are imported. Nothing is imported or parsed.

    Args:
        patch: the patch.
        row: its row in the report.
        texts: for an applied patch, the text of each of its modules at that time.
    """
    framework = f"{row.distribution} {row.version or '(version unknown)'}"
    if row.status is Status.ABSENT and row.version is None:
        framework = f"no {row.distribution}"
    code = None
    if isinstance(patch, KnownBug) and (row.status in _DECIDED_BY_CODE or row.status is Status.PENDING):
        code = _fingerprint(patch, texts)
    reason = "" if row.status in (Status.APPLIED, Status.PENDING) else row.reason[:_MOST_CHARACTERS]
    return Effect(row.status.value, framework, code, reason)


def _fingerprint(patch: KnownBug, texts: Mapping[str, str]) -> str:
    """Return 16 hex digits over the patched modules, the patch, and the modules of its implementations.

    It is computed from text, not from code objects, which a module that is not imported lacks.
    """
    parts = [
        repr([variant.changes for variant in patch.variants]),
        f"assertions {'off' if sys.flags.optimize else 'on'}",
    ]
    parts += [texts.get(module) or _text(module) for module in patch.modules]
    parts += [_text(path.partition(":")[0]) for path in patch.implementations]
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:16]


def _text(module: str) -> str:
    try:
        return locating.read_module(module).text
    except (NotFound, Unreadable) as error:
        return f"{type(error).__name__} {module}"


# ------------------------------------------------------------------------------------- between processes


Who = Callable[[Sequence[Process]], str]


def differences(processes: Sequence[Process], who: Who | None = None) -> str | None:
    """Return the differences between processes, as text of several lines; None if there are none.

    Args:
        processes: the processes, in the order of the text.
        who: names a group of processes; by default `where`, for ranks.
    """
    who = who or where
    sections = []
    unable = [(process.problem, process) for process in processes if process.problem is not None]
    if unable:
        sections.append(_section("these could not report their patches", unable, who))
    able = [process for process in processes if process.problem is None]
    for name in dict.fromkeys(name for process in able for name in process.versions):
        versions = [(process.versions.get(name, "unknown"), process) for process in able]
        if len({version for version, _ in versions}) > 1:
            sections.append(_section(name, versions, who))
    names = dict.fromkeys(name for process in able for name in process.effects)
    sections += [text for name in names if (text := _difference(name, able, who)) is not None]
    if not sections:
        return None
    more = len(sections) - _MOST_PATCHES
    return "\n".join(sections[:_MOST_PATCHES] + ([f"and {more} more patches"] if more > 0 else []))


def _difference(name: str, processes: Sequence[Process], who: Who) -> str | None:
    all_effects = [process.effects.get(name) for process in processes]
    present = [effect for effect in all_effects if effect is not None]
    acts = any(effect.in_force or effect.status == Status.FAILED.value for effect in present)
    # If a patch acts on no rank, a rank that disabled it or does not know it makes no difference.
    compared = all_effects if acts else [effect for effect in present if effect.status not in _SWITCHED_OFF]
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
    statuses: dict[tuple[str | None, ...], set[str]] = {}
    for effect in present:
        statuses.setdefault(effect.key, set()).add(effect.status)

    def label(effect: Effect | None) -> str:
        if effect is None:
            return "not registered: no plugin provides it"
        if not effect.in_force:
            return f"{effect.status} ({effect.reason})"
        code = f", code {effect.code}" if several_codes else ""
        return f"{' or '.join(sorted(statuses[effect.key]))} ({effect.framework}{code})"

    return _section(name, zip(map(label, all_effects), processes, strict=True), who)


def _section(title: str, states: Iterable[tuple[str, Process]], who: Who) -> str:
    groups = grouped((text, "", process) for text, process in states)
    return "\n".join([f"{title}:", *(f"  {who(group.processes)}: {group.what}" for group in groups)])


def where(ranks: Sequence[Process]) -> str:
    """Return ``ranks 0-6 on host-a, host-b`` or ``rank 7 on host-c (pid 4711)``."""
    hosts = list(dict.fromkeys(process.host for process in ranks))
    listed = ", ".join(hosts[:_MOST_HOSTS])
    if len(hosts) > _MOST_HOSTS:
        listed += f" and {len(hosts) - _MOST_HOSTS} more hosts"
    pid = f" (pid {ranks[0].pid})" if len(ranks) == 1 else ""
    return f"{ranks_text(int(process.rank or 0) for process in ranks)} on {listed}{pid}"
