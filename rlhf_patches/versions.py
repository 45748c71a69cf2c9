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
import sys
import urllib.parse
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .vocabulary import Guard

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


def claims(folders: list[str]) -> list[tuple[str, str | None]]:
    """Name and version of every distribution whose metadata lies in these folders."""
    return [
        (str(copy.metadata["Name"]), _version_text(copy)) for copy in _copies(path=folders) if "Name" in copy.metadata
    ]


def _copies(distribution: str | None = None, path: list[str] | None = None) -> list[importlib.metadata.Distribution]:
    found = []
    for copy in importlib.metadata.distributions(name=distribution, path=sys.path if path is None else path):
        try:
            copy.metadata  # noqa: B018 - a damaged folder raises here, or on 3.14 and later gives None
        except Exception:
            continue
        found.append(copy)
    return found


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
    roots = [str(copy.locate_file(""))]
    try:
        direct = json.loads(copy.read_text("direct_url.json") or "{}")
        url = urllib.parse.urlparse(direct.get("url", ""))
        if url.scheme == "file" and direct.get("dir_info", {}).get("editable"):
            roots.append(urllib.parse.unquote(url.path))
    except (OSError, ValueError, AttributeError):
        pass
    real = os.path.realpath(origin)
    return any(real.startswith(os.path.join(os.path.realpath(root), "")) for root in roots)
