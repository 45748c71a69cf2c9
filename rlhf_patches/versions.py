"""Which version of a framework a module belongs to, and whether a guard covers it.

The installed metadata and the imported file need not belong together: a Megatron-LM checkout on
``PYTHONPATH`` shadows an installed megatron-core wheel. A version therefore counts only when the metadata
owns the file; in every other case the version is unknown and the shape of the code alone decides.
"""

from __future__ import annotations

import enum
import importlib.metadata
import json
import os
import stat
import sys
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .vocabulary import Guard

MAX_METADATA = 2**20
"""Bytes of one metadata file. The largest of those that were looked at, pandas', has 0.09 MiB."""

UNREAD = "; but its code has the defect. This version was not read, so nothing was changed: please report it"


class Verdict(enum.Enum):
    """What the version guard says."""

    AFFECTED = "affected"
    OUTSIDE = "outside"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """``version`` is the metadata's text, None when unknown; ``reason`` says how the verdict came about."""

    verdict: Verdict
    version: str | None
    reason: str


def why_absent(guard: Guard, error: Exception) -> tuple[str | None, str]:
    """The installed version, if there is one, and why a module that could not be located counts as absent."""
    copies = _copies(guard.distribution)
    if not copies:
        return None, f"{guard.distribution} is not installed"
    version = _version_text(copies[0])
    return version, f"{guard.distribution} {version or '(no version)'} is installed, but {error}"


def check(guard: Guard, origin: str | None) -> Finding:
    """Apply a version guard to the file ``origin`` (None when the file is unknown)."""
    copies = _copies(guard.distribution)
    if not copies:
        return unknown(f"no metadata of {guard.distribution} is installed")
    owners = [copy for copy in copies if origin is not None and _owns(copy, origin)]
    texts = sorted({_version_text(copy) or "no version" for copy in (owners or copies)})
    if not owners:
        return unknown(f"the metadata of {guard.distribution} ({', '.join(texts)}) does not belong to {origin}")
    if len(texts) > 1:
        return unknown(f"{guard.distribution} has metadata of several versions: {', '.join(texts)}")
    return judge(guard, _version_text(owners[0]))


def unknown(reason: str) -> Finding:
    """The finding where no version can be told."""
    return Finding(Verdict.UNKNOWN, None, reason)


def judge(guard: Guard, text: str | None) -> Finding:
    """Apply a version guard to the version that the metadata states, None when it states none."""
    if text is None:
        return unknown(f"the metadata of {guard.distribution} states no version")
    try:
        version = Version(text)
    except ValueError:  # InvalidVersion, or more digits than Python converts
        return Finding(Verdict.UNKNOWN, text, f"version {text!r} of {guard.distribution} is not PEP 440")
    # Pre-releases carry a defect as much as releases do, so they count as members of a range.
    if SpecifierSet(guard.versions).contains(version, prereleases=True):
        return Finding(
            Verdict.AFFECTED, text, f"{guard.distribution} {text} is affected ({guard.versions or 'every version'})"
        )
    return Finding(Verdict.OUTSIDE, text, f"{guard.distribution} {text} is not affected (affected: {guard.versions})")


def worst(findings: list[Finding]) -> Finding:
    """Of several modules' findings the one that holds back most."""
    order = (Verdict.OUTSIDE, Verdict.UNKNOWN, Verdict.AFFECTED)
    return min(findings, key=lambda finding: order.index(finding.verdict))


def _copies(distribution: str) -> list[importlib.metadata.Distribution]:
    found = []
    for copy in importlib.metadata.distributions(name=distribution, path=sys.path):
        try:
            if not _is_bounded(copy, "METADATA", "PKG-INFO", ""):
                continue
            copy.metadata  # noqa: B018 - a damaged folder raises here, or on 3.14 and later gives None
        except Exception:
            continue
        found.append(copy)
    return found


def _is_bounded(copy: importlib.metadata.Distribution, *names: str) -> bool:
    """Whether these files of a copy may be read: importlib.metadata would read a pipe or a device for ever."""
    folder = getattr(copy, "_path", None)
    if not isinstance(folder, Path):  # in a zip, or from somebody's own finder
        return True
    for name in names:
        try:
            state = os.stat(folder / name)
        except OSError:  # importlib.metadata passes over it too
            continue
        regular = stat.S_ISREG(state.st_mode) and state.st_size <= MAX_METADATA
        if not regular and not stat.S_ISDIR(state.st_mode):
            return False
    return True


def _version_text(copy: importlib.metadata.Distribution) -> str | None:
    try:
        metadata = copy.metadata
        if "Version" not in metadata:
            return None
        text = metadata["Version"]
    # Metadata that is missing or None (a half removed package) reads as "no version", on every Python.
    except Exception:
        return None
    return str(text) if text else None


def _owns(copy: importlib.metadata.Distribution, origin: str) -> bool:
    real = os.path.realpath(origin)
    roots = (str(copy.locate_file("")), _editable_root(copy))
    return any(root and real.startswith(os.path.join(os.path.realpath(root), "")) for root in roots)


def _editable_root(copy: importlib.metadata.Distribution) -> str | None:
    """The folder that an editable install's ``direct_url.json`` names."""
    try:
        if not _is_bounded(copy, "direct_url.json"):
            return None
        direct = json.loads(copy.read_text("direct_url.json") or "{}")
        url = urllib.parse.urlparse(direct.get("url", ""))
        if url.scheme == "file" and direct.get("dir_info", {}).get("editable"):
            return os.path.realpath(urllib.parse.unquote(url.path))
    except Exception:  # nested too deeply, a NUL or half a surrogate in the path, anything else that is no JSON
        pass
    return None
