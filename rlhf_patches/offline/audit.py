"""Which known bugs a set of pins has, which patch repairs each, and which release does: by versions alone.

What has not been looked up is part of the answer: a pin without a version, a version newer than what was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version

from ..definitions.patch import KnownBug, Patch
from ..definitions.registry import Registered
from ..definitions.status import plural
from ..guards import versions
from ..guards.versions import Verdict
from .pins import Pin, PinsError, Unread

_MOST = 1000
"""Pins of frameworks; an environment has one of each, and each has a page of bugs."""


@dataclass(frozen=True)
class Bug:
    """A known bug of one release.

    Attributes:
        patch: what repairs it at run time, or the advice where nothing does.
        plugin: what brings the patch or advice.
        fixed: the first release without it, None where none was known when the record was made.
        read: the newest release that was read, None where the patch has no record (a plugin's).
    """

    patch: KnownBug
    plugin: str
    fixed: str | None
    read: str | None

    @property
    def repaired_by(self) -> str | None:
        """What brings the patch; None for an advice."""
        return self.plugin if isinstance(self.patch, Patch) else None


@dataclass(frozen=True)
class Audited:
    """A pin of a framework that patches are for.

    Attributes:
        pin: as it was read.
        bugs: None where none was looked up, or none was found in a version that the record does not reach.
        reason: why it was not looked up, or not as far as the newest release read; empty where it was.
        newest_read: that release, where the version is newer.
        still_open: the bugs that it has.
    """

    pin: Pin
    bugs: tuple[Bug, ...] | None
    reason: str = ""
    newest_read: str | None = None
    still_open: tuple[Bug, ...] = ()


def audit(pins: Iterable[Pin], registered: Sequence[Registered]) -> list[Audited]:
    """Look up every pin of a framework that a patch is for; others are left out.

    Args:
        pins: what files and environments name; the same pin of several places stays several.
        registered: the patches.

    Returns:
        one entry per pin, in their order.

    Raises:
        PinsError: they are more than any set of files has.
    """
    by_name: dict[str, list[Registered]] = {}
    for item in registered:
        by_name.setdefault(canonicalize_name(item.patch.distribution), []).append(item)
    wanted = [pin for pin in pins if pin.name in by_name]
    if len(wanted) > _MOST:
        raise PinsError(f"what was given names frameworks {len(wanted)} times: expected {_MOST} at most")
    return [_audited(pin, by_name[pin.name]) for pin in wanted]


def that_count(unread: Iterable[Unread], registered: Sequence[Registered]) -> list[Unread]:
    """Without those that would count only if they named a framework: by its distribution or its import name."""
    names = {name for item in registered for name in _names(item.patch)}
    spelled = "|".join(re.escape(name).replace(r"\-", "[-_.]") for name in sorted(names))
    named = re.compile(rf"(?<![A-Za-z0-9_])(?:{spelled})(?![A-Za-z0-9_])", re.IGNORECASE)
    return [each for each in unread if each.mention is None or (names and named.search(each.mention))]


def _names(patch: KnownBug) -> set[str]:
    return {canonicalize_name(patch.distribution), *(module.partition(".")[0] for module in patch.modules)}


def _audited(pin: Pin, items: list[Registered]) -> Audited:
    if pin.version is None:
        return Audited(pin, None, pin.note or "no version is named")
    try:
        version = Version(pin.version)
    except ValueError:  # InvalidVersion, or more digits than Python converts
        return Audited(pin, None, f"{pin.version!r:.100} is no version of PEP 440")
    bugs = tuple(_bug(item) for item in items if _has(item.patch, version))
    # A local version (1.5.1+cu128) is the release that it is made of.
    beyond = [bug for bug in map(_bug, items) if bug.read and Version(version.public) > Version(bug.read)]
    if not beyond:
        return Audited(pin, bugs)
    newest = max((bug.read for bug in beyond if bug.read), key=Version)
    still_open = tuple(bug for bug in beyond if bug.fixed is None)
    return Audited(pin, bugs or None, _newer(newest, still_open), newest, still_open)


def _newer(newest: str, still_open: Sequence[Bug]) -> str:
    count = f"{plural(len(still_open), 'known bug') if still_open else 'no known bugs'} without a fix"
    names = f": {', '.join(bug.patch.name for bug in still_open)}" if still_open else ""
    return f"newer than {newest}, the newest release read, which has {count}{names}"


def _has(patch: KnownBug, version: Version) -> bool:
    guards = [variant.guard for variant in patch.variants]
    if not any(versions.judge(guard, str(version)).verdict is Verdict.AFFECTED for guard in guards):
        return False
    without = releases().get(patch.name, {}).get("without", ())
    return not any(Version(first) <= version <= Version(last) for first, last in without)


def _bug(item: Registered) -> Bug:
    known = releases().get(item.patch.name, {})
    return Bug(item.patch, item.plugin, known.get("fixed"), known.get("read"))


@cache
def releases() -> dict[str, Any]:
    """The record of releases, as it is shipped (release_record/shipped.py has the keys)."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("releases.json").read_text(encoding="utf-8"))
    return found
