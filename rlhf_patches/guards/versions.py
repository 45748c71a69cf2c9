"""Which version of a framework a module belongs to, and whether a guard covers it.

The installed metadata and the imported file need not belong together: a Megatron-LM checkout on
``PYTHONPATH`` shadows an installed megatron-core wheel. A version therefore counts only when the metadata
owns the file; in every other case the version is unknown and the shape of the code alone decides.
"""

from __future__ import annotations

import enum
import os
import re
import stat
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Union

from .. import installed
from ..definitions import ranges
from ..definitions.listed import ListedGuard, range_of, ranges_of
from ..import_system import no_signal
from . import locating, memory
from .places import NotFound

if TYPE_CHECKING:
    import importlib.metadata

    from ..definitions.guard import CoInstalled, Guard
    from ..definitions.listed import ListedCoInstalled

_Metadata = Union["installed.Metadata", "importlib.metadata.Distribution"]

MAX_METADATA = 2**20
"""Bytes of one metadata file. The largest of those that were looked at, pandas', has 0.09 MiB."""

_VERSION = re.compile(r"^Version:[ \t]*(.*)", re.MULTILINE | re.IGNORECASE)

UNREVIEWED = "; but its code has the defect. This version was not read, so nothing was changed: please report it"


class Verdict(enum.Enum):
    """What the version guard says."""

    AFFECTED = "affected"
    OUTSIDE = "outside"
    UNKNOWN = "unknown"


class Finding(NamedTuple):
    """What the version guard says, and how that came about.

    Attributes:
        verdict: what it says.
        version: the metadata's text, None when unknown.
        reason: why.
        beside_was_read: where the verdict is OUTSIDE for what is beside: whether that is known not to matter, so that
            the code does not matter either; False where it is newer than what was read, None for any other verdict.
    """

    verdict: Verdict
    version: str | None
    reason: str
    beside_was_read: bool | None = None


def is_installed(distribution: str) -> bool:
    """Whether there is metadata of a distribution."""
    return bool(_copies(distribution))


def not_installed(distribution: str) -> str:
    """Why a patch is absent where there is none."""
    return f"{distribution} is not installed"


def why_absent(guard: Guard | ListedGuard, error: Exception) -> tuple[str | None, str]:
    """The installed version, if there is one, and why a module that could not be located counts as absent."""
    copies = _copies(guard.distribution)
    if not copies:
        return None, not_installed(guard.distribution)
    version = copies[0].version
    return version, f"{guard.distribution} {version or '(no version)'} is installed, but {error}"


def judge_file(guard: Guard | ListedGuard, origin: str | None) -> Finding:
    """Apply a version guard to the file ``origin`` (None when the file is unknown)."""
    copies = _copies(guard.distribution)
    owners = [copy for copy in copies if origin is not None and copy.owns(origin)]
    return _of_copies(guard, copies, owners, origin)


def with_beside(guard: Guard | ListedGuard, finding: Finding) -> Finding:
    """The finding, where another distribution counts too: what is installed of that, or imported."""
    if guard.co_installed is None or finding.verdict is Verdict.OUTSIDE:
        return finding
    try:
        origin = locating.locate(guard.co_installed.package).origin
    except NotFound:
        return beside(guard, finding, None)
    return beside(guard, finding, judge_file(_as_guard(guard.co_installed), origin))


def _as_guard(beside: CoInstalled | ListedCoInstalled) -> ListedGuard:
    return ListedGuard(beside.distribution, beside.versions)


def beside(guard: Guard | ListedGuard, finding: Finding, other: Finding | None) -> Finding:
    """One finding of two, of a guard that names another distribution.

    Args:
        guard: the guard.
        finding: of the guarded distribution; not OUTSIDE.
        other: of the one beside it; None where that is not there.
    """
    assert guard.co_installed is not None
    if other is None:
        reason = f"{guard.co_installed.distribution} is not there, beside which {guard.distribution} has the defect"
        return Finding(Verdict.OUTSIDE, finding.version, reason, beside_was_read=True)
    if other.verdict is Verdict.AFFECTED:
        return finding._replace(reason=f"{finding.reason} beside {guard.co_installed.distribution} {other.version}")
    if other.verdict is Verdict.UNKNOWN:
        return finding._replace(verdict=Verdict.UNKNOWN, reason=f"{finding.reason}; {other.reason}")
    needed = guard.co_installed.distribution
    reason = f"{guard.distribution} {finding.version} is not affected beside {needed} {other.version}"
    was_read = not ranges.ends_before(guard.co_installed.versions, other.version or "")
    return Finding(Verdict.OUTSIDE, finding.version, f"{reason} (affected: {range_of(guard)})", was_read)


def judge_missing(guard: Guard | ListedGuard, parents: list[str]) -> Finding:
    """Apply a version guard where a module is missing.

    Args:
        guard: the guard.
        parents: where its parent package is. That has to belong to the metadata, which say nothing about a package
            that comes from elsewhere. Empty where no parent package is there either.
    """
    copies = _copies(guard.distribution)
    owners = [copy for copy in copies if not parents or any(map(copy.owns, parents))]
    return _of_copies(guard, copies, owners, ", ".join(parents))


def _of_copies(
    guard: Guard | ListedGuard,
    copies: list[_Copy],
    owners: list[_Copy],
    origin: str | None,
) -> Finding:
    if not copies:
        return unknown(f"no metadata of {guard.distribution} is installed")
    texts = sorted({copy.version or "no version" for copy in (owners or copies)})
    if not owners:
        return unknown(f"the metadata of {guard.distribution} ({', '.join(texts)}) does not belong to {origin}")
    if len(texts) > 1:
        return unknown(f"{guard.distribution} has metadata of several versions: {', '.join(texts)}")
    return judge(guard, owners[0].version)


def unknown(reason: str) -> Finding:
    """The finding where no version can be told."""
    return Finding(Verdict.UNKNOWN, None, reason)


def judge(guard: Guard | ListedGuard, text: str | None) -> Finding:
    """Apply a version guard to the version that the metadata states, None when it states none."""
    if text is None:
        return unknown(f"the metadata of {guard.distribution} states no version")
    inside = ranges.plainly_contains(guard.versions, text)
    if inside is None:
        from packaging.version import Version  # only for what is not plain

        try:
            version = Version(text)
        except ValueError:  # InvalidVersion, or more digits than Python converts
            return Finding(Verdict.UNKNOWN, text, f"version {text!r} of {guard.distribution} is not PEP 440")
        # Pre-releases carry a defect as much as releases do, so they count as members of a range.
        inside = ranges.parsed(guard.versions).contains(version, prereleases=True)
    if inside:
        return Finding(
            Verdict.AFFECTED, text, f"{guard.distribution} {text} is affected ({guard.versions or 'every version'})"
        )
    return outside(guard.distribution, text, (guard,))


def outside(distribution: str, version: str | None, guards: Iterable[Guard | ListedGuard]) -> Finding:
    """The finding where a version is in the range of no guard."""
    reason = f"{distribution} {version} is not affected (affected: {ranges_of(guards)})"
    return Finding(Verdict.OUTSIDE, version, reason)


def worst(findings: list[Finding]) -> Finding:
    """Of several modules' findings the one that holds back most."""
    order = (Verdict.OUTSIDE, Verdict.UNKNOWN, Verdict.AFFECTED)
    return min(findings, key=lambda finding: order.index(finding.verdict))


class _Copy(NamedTuple):
    """Metadata of a distribution: the version that it states, and the folders whose files belong to it."""

    version: str | None
    roots: tuple[str, ...]

    def owns(self, origin: str) -> bool:
        real = locating.real_path(origin)
        return any(real.startswith(os.path.join(root, "")) for root in self.roots)


def _copies(distribution: str) -> list[_Copy]:
    return memory.remembered(("metadata", distribution, tuple(sys.path)), lambda: _search(distribution), small=True)


def _search(distribution: str) -> list[_Copy]:
    found = []
    names = (distribution, *installed.OTHER_BUILDS.get(installed.normalized(distribution), ()))
    for copy in (each for name in names for each in _metadata_of(name)):
        try:
            if not _is_bounded(copy, "METADATA", "PKG-INFO", ""):
                continue
            version = _version_text(copy)
        except no_signal(Exception):  # a damaged folder
            continue
        roots = (str(copy.locate_file("")), _editable_root(copy))
        found.append(_Copy(version, tuple(locating.real_path(root) for root in roots if root)))
    return found


def _metadata_of(distribution: str) -> Iterable[_Metadata]:
    # Not "", which means the working directory: what has no time of change is listed anew for every distribution.
    path = [entry or os.curdir for entry in sys.path]
    everything = memory.remembered(("installed", *path), lambda: installed.find(path), small=True)
    if everything is not None:
        return everything.get(installed.normalized(distribution), ())
    import importlib.metadata  # nothing of the standard library waits for the engine's lock

    return importlib.metadata.distributions(name=distribution, path=path)


def _is_bounded(copy: _Metadata, *names: str) -> bool:
    """Whether these files of a copy may be read: a pipe or a device would be read for ever."""
    folder = getattr(copy, "_path", None)
    if not isinstance(folder, (str, os.PathLike)):  # in a zip, or from a finder of another kind
        return True
    for name in names:
        try:
            state = os.stat(os.path.join(folder, name) if name else folder)
        except no_signal(OSError):  # reading passes over it too
            continue
        regular = stat.S_ISREG(state.st_mode) and state.st_size <= MAX_METADATA
        if not regular and not stat.S_ISDIR(state.st_mode):
            return False
    return True


def _version_text(copy: _Metadata) -> str | None:
    # Not `copy.metadata`: that parses the description too, a readme of a thousand lines.
    text = copy.read_text("METADATA") or copy.read_text("PKG-INFO") or copy.read_text("") or ""
    version = _VERSION.search(text.partition("\n\n")[0])
    return version.group(1).strip() or None if version else None


def _editable_root(copy: _Metadata) -> str | None:
    """The folder that an editable install's ``direct_url.json`` names."""
    try:
        text = copy.read_text("direct_url.json") if _is_bounded(copy, "direct_url.json") else None
        if not text:
            return None
        import json
        import urllib.parse

        direct = json.loads(text)
        url = urllib.parse.urlparse(direct.get("url", ""))
        if url.scheme == "file" and direct.get("dir_info", {}).get("editable"):
            return os.path.realpath(urllib.parse.unquote(url.path))
    # Nested too deeply, a NUL or half a surrogate in the path, anything else that is no JSON.
    except no_signal(Exception):
        pass
    return None
