"""The version guard: the version of a module's framework, and whether a guard covers it.

The installed metadata and the imported file may not belong together: a Megatron-LM checkout on ``PYTHONPATH`` shadows
an installed megatron-core wheel. A version therefore counts only if the metadata owns the file; otherwise the version
is unknown and only the shape of the code decides.
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
"""The largest metadata file in bytes. The largest known one, pandas', has 0.09 MiB."""

_VERSION = re.compile(r"^Version:[ \t]*(.*)", re.MULTILINE | re.IGNORECASE)

UNREVIEWED = "; but its code has the defect. This version is not reviewed, so nothing was changed: please report it"


class Verdict(enum.Enum):
    """The result of the version guard."""

    AFFECTED = "affected"
    OUTSIDE = "outside"
    UNKNOWN = "unknown"


class Finding(NamedTuple):
    """The result of the version guard with its reason.

    Attributes:
        verdict: the result.
        version: the metadata's version, None if unknown.
        reason: the reason.
        beside_was_read: if the verdict is OUTSIDE because of the other distribution: whether its version was reviewed,
            so that the code does not matter; False if it is newer than the reviewed ones, None for any other verdict.
    """

    verdict: Verdict
    version: str | None
    reason: str
    beside_was_read: bool | None = None


def is_installed(distribution: str) -> bool:
    """Whether a distribution has installed metadata."""
    return bool(_copies(distribution))


def not_installed(distribution: str) -> str:
    """Return the reason for an absent patch without metadata."""
    return f"{distribution} is not installed"


def why_absent(guard: Guard | ListedGuard, error: Exception) -> tuple[str | None, str]:
    """Return the installed version, if any, and why a module that cannot be located counts as absent."""
    copies = _copies(guard.distribution)
    if not copies:
        return None, not_installed(guard.distribution)
    version = copies[0].version
    return version, f"{guard.distribution} {version or '(no version)'} is installed, but {error}"


def judge_file(guard: Guard | ListedGuard, origin: str | None) -> Finding:
    """Apply a version guard to the file ``origin`` (None if the file is unknown)."""
    copies = _copies(guard.distribution)
    owners = [copy for copy in copies if origin is not None and copy.owns(origin)]
    return _of_copies(guard, copies, owners, origin)


def with_beside(guard: Guard | ListedGuard, finding: Finding) -> Finding:
    """Return the finding together with that of the guard's other distribution, if it has one."""
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
    """Combine two findings, for a guard that names another distribution.

    Args:
        guard: the guard.
        finding: the guarded distribution's finding; not OUTSIDE.
        other: the other distribution's finding; None if it is not installed.
    """
    assert guard.co_installed is not None
    if other is None:
        reason = (
            f"{guard.distribution} has the defect only with {guard.co_installed.distribution}, which is not installed"
        )
        return Finding(Verdict.OUTSIDE, finding.version, reason, beside_was_read=True)
    if other.verdict is Verdict.AFFECTED:
        return finding._replace(reason=f"{finding.reason} with {guard.co_installed.distribution} {other.version}")
    if other.verdict is Verdict.UNKNOWN:
        return finding._replace(verdict=Verdict.UNKNOWN, reason=f"{finding.reason}; {other.reason}")
    needed = guard.co_installed.distribution
    reason = f"{guard.distribution} {finding.version} is not affected with {needed} {other.version}"
    was_read = not ranges.ends_before(guard.co_installed.versions, other.version or "")
    return Finding(Verdict.OUTSIDE, finding.version, f"{reason} (affected: {range_of(guard)})", was_read)


def judge_missing(guard: Guard | ListedGuard, parents: list[str]) -> Finding:
    """Apply a version guard for a missing module.

    Args:
        guard: the guard.
        parents: the location of its parent package, which must belong to the metadata. Empty if there is no parent
            package.
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
    """Return the finding for an unknown version."""
    return Finding(Verdict.UNKNOWN, None, reason)


def judge(guard: Guard | ListedGuard, text: str | None) -> Finding:
    """Apply a version guard to the metadata's version; None if the metadata has none."""
    if text is None:
        return unknown(f"the metadata of {guard.distribution} states no version")
    inside = ranges.plainly_contains(guard.versions, text)
    if inside is None:
        from packaging.version import Version  # only for versions that are not simple

        try:
            version = Version(text)
        except ValueError:  # InvalidVersion, or more digits than Python converts
            return Finding(Verdict.UNKNOWN, text, f"version {text!r} of {guard.distribution} is not PEP 440")
        # Pre-releases have a defect like releases, so they count as members of a range.
        inside = ranges.parsed(guard.versions).contains(version, prereleases=True)
    if inside:
        return Finding(
            Verdict.AFFECTED, text, f"{guard.distribution} {text} is affected ({guard.versions or 'every version'})"
        )
    return outside(guard.distribution, text, (guard,))


def outside(distribution: str, version: str | None, guards: Iterable[Guard | ListedGuard]) -> Finding:
    """Return the finding for a version that is in no guard's range."""
    reason = f"{distribution} {version} is not affected (affected: {ranges_of(guards)})"
    return Finding(Verdict.OUTSIDE, version, reason)


def worst(findings: list[Finding]) -> Finding:
    """Return the most restrictive of several modules' findings."""
    order = (Verdict.OUTSIDE, Verdict.UNKNOWN, Verdict.AFFECTED)
    return min(findings, key=lambda finding: order.index(finding.verdict))


class _Copy(NamedTuple):
    """Metadata of a distribution: its version, and the folders whose files belong to it."""

    version: str | None
    roots: tuple[str, ...]

    def owns(self, origin: str) -> bool:
        real = locating.real_path(origin)
        return any(real.startswith(os.path.join(root, "")) for root in self.roots)


def _copies(distribution: str) -> list[_Copy]:
    return memory.remembered(("metadata", distribution, tuple(sys.path)), lambda: _search(distribution), small=True)


def _search(distribution: str) -> list[_Copy]:
    copies = []
    names = (distribution, *installed.OTHER_BUILDS.get(installed.normalized(distribution), ()))
    for copy in (each for name in names for each in _metadata_of(name)):
        try:
            if not _is_bounded(copy, "METADATA", "PKG-INFO", ""):
                continue
            version = _version_text(copy)
        except no_signal(Exception):  # a damaged folder
            continue
        roots = (str(copy.locate_file("")), _editable_root(copy))
        copies.append(_Copy(version, tuple(locating.real_path(root) for root in roots if root)))
    return copies


def _metadata_of(distribution: str) -> Iterable[_Metadata]:
    # Not "", the working directory: an entry without a modification time is listed again for every distribution.
    path = [entry or os.curdir for entry in sys.path]
    everything = memory.remembered(("installed", *path), lambda: installed.find(path), small=True)
    if everything is not None:
        return everything.get(installed.normalized(distribution), ())
    import importlib.metadata  # no module of the standard library waits for the engine's lock

    return importlib.metadata.distributions(name=distribution, path=path)


def _is_bounded(copy: _Metadata, *names: str) -> bool:
    """Whether these files of a copy may be read: reading a pipe or a device may never end."""
    folder = getattr(copy, "_path", None)
    if not isinstance(folder, (str, os.PathLike)):  # in a zip, or from a finder of another kind
        return True
    for name in names:
        try:
            state = os.stat(os.path.join(folder, name) if name else folder)
        except no_signal(OSError):  # reading also ignores it
            continue
        regular = stat.S_ISREG(state.st_mode) and state.st_size <= MAX_METADATA
        if not regular and not stat.S_ISDIR(state.st_mode):
            return False
    return True


def _version_text(copy: _Metadata) -> str | None:
    # Not `copy.metadata`, which also parses the description, a readme of a thousand lines.
    text = copy.read_text("METADATA") or copy.read_text("PKG-INFO") or copy.read_text("") or ""
    version = _VERSION.search(text.partition("\n\n")[0])
    return version.group(1).strip() or None if version else None


def _editable_root(copy: _Metadata) -> str | None:
    """Return the folder that an editable install's ``direct_url.json`` names."""
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
    # Nested too deeply, a NUL or half a surrogate in the path, or anything else that is not JSON.
    except no_signal(Exception):
        pass
    return None
