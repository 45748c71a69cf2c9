"""One process's patches in plain values, to be compared with those of other processes."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from . import __version__, public, site_hook
from .reporting import PatchReport, Status

_NAMED = 4  # labels written out where many processes agree


class VerifyError(RuntimeError):
    """Processes that should have the same patches do not, or one of them could not be asked."""


def process_state() -> dict[str, Any]:
    """This process's state in plain values. Where the site hook still waits for a framework, the engine is loaded now.

    Returns:
        ``host``, ``pid``, ``python``, ``rlhf_patches`` (versions), ``active`` (False: nothing has called `apply`) and
        ``patches``: by name, a dictionary of ``status`` (`applied` also where the import is still to come), ``version``
        of the framework, ``code`` (a fingerprint of what the patched functions run; None before the import) and
        ``reason``.

    Raises:
        SettingsError: a variable of this process is wrong.
        PatchError: strict mode and a refused or failed patch.
    """
    site_hook.load_now()
    codes = public.engine.codes()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "rlhf_patches": __version__,
        "active": public.engine.asked().chosen is not None,
        "patches": {row.name: _patch_state(row, codes.get(row.name, {})) for row in public.report()},
    }


def differences(states: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What differs between processes, as lines that name them; None when nothing does.

    Args:
        states: what `process_state` has returned, by what each process is to be called.
    """
    found: list[str] = []
    for what in ("rlhf_patches", "python"):
        found += _groups(what, {label: state[what] for label, state in states.items()}, str)
    for name in dict.fromkeys(name for state in states.values() for name in state["patches"]):
        patches = {label: state["patches"].get(name, _UNKNOWN) for label, state in states.items()}
        outcomes = {label: (patch["status"], patch["version"]) for label, patch in patches.items()}
        described = {outcomes[label]: f"{patch['status']} ({patch['reason']})" for label, patch in patches.items()}
        codes = {label: patch["code"] for label, patch in patches.items() if patch["code"]}
        found += _groups(name, outcomes, described.__getitem__) or _groups(name, codes, "applied, as code {}".format)
    return "\n".join(found) if found else None


_UNKNOWN = {"status": "unknown", "version": None, "code": None, "reason": "no installed plugin brings this patch"}


def _patch_state(row: PatchReport, codes: Mapping[str, CodeType]) -> dict[str, Any]:
    # Whether a framework has been imported yet differs between processes that do the same.
    status = Status.APPLIED if row.status is Status.PENDING else row.status
    parts = [f"{target} {code_fingerprint(code)}" for target, code in sorted(codes.items())]
    return {
        "status": status.value,
        # A patch that is switched off never looks for the version.
        "version": None if status is Status.DISABLED else row.version,
        "code": _digest(parts) if parts else None,
        "reason": row.reason,
    }


def code_fingerprint(code: CodeType) -> str:
    """16 hexadecimal digits over all that decides what a code object does: not where its file lies."""
    # marshal would not do: its output depends on how often a constant is referred to.
    parts: list[object] = [
        code.co_name,
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        [_constant(constant) for constant in code.co_consts],
        getattr(code, "co_exceptiontable", b""),
    ]
    return _digest(repr(part) for part in parts)


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return code_fingerprint(value)
    if isinstance(value, frozenset):  # the order of its items differs between processes
        return repr(sorted(map(_constant, value)))
    if isinstance(value, tuple):
        return repr([_constant(item) for item in value])
    return f"{type(value).__name__} {value!r}"


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _groups(what: str, values: Mapping[str, Any], said: Callable[[Any], str]) -> list[str]:
    """Lines for a thing on which processes disagree, the most common answer first; none when they agree."""
    groups: dict[Any, list[str]] = {}
    for label, value in values.items():
        groups.setdefault(value, []).append(label)
    if len(groups) < 2:
        return []
    lines = [f"{what}:"]
    for value, labels in sorted(groups.items(), key=lambda item: -len(item[1])):
        more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
        lines.append(f"  {said(value)}: {', '.join(labels[:_NAMED])}{more}")
    return lines
