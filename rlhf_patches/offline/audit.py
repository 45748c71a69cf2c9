"""Which known bugs a set of pins has, which patch repairs each, and which release does: by versions alone.

What has not been looked up is part of the answer: a pin without a version, a version newer than what was read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from .. import installed
from ..definitions import pages, ranges, registry
from ..definitions.bug import KnownBug
from ..definitions.guard import CoInstalled, Guard
from ..definitions.listed import co_installed_text
from ..definitions.patch import Patch
from ..definitions.registry import Registered
from ..definitions.words import plural
from ..guards import versions
from ..guards.versions import Verdict
from . import pairs
from .pairs import Failing
from .pins import Pin, PinsError, Unread
from .run_config import RunConfig

_MOST = 1000
"""Pins of frameworks; an environment has one of each, and each has a page of bugs."""
Named = Mapping[str, set[str | None]]
"""The versions of each distribution that pins name, None where one has none."""
_SHOWN = 20  # entries that were not understood, each with its line


@dataclass(frozen=True)
class Bug:
    """A known bug of one release.

    Attributes:
        patch: what repairs it at run time, or the advice where nothing does.
        plugin: what brings the patch or advice.
        fixed: the first release without it, None where none was known when the record was made.
        read: the newest release that was read, None where that is not known. Of a plugin's patch, which has no record,
            both are what its range says: ``<1.5`` names the release with the fix, ``<=1.9`` the newest that was read.
        beside: beside what it has it, and whether that is named; empty where it always has.
    """

    patch: KnownBug
    plugin: str
    fixed: str | None
    read: str | None
    beside: str = ""

    @property
    def repaired_by(self) -> str | None:
        """What brings the patch; None for an advice."""
        return self.plugin if isinstance(self.patch, Patch) else None

    @property
    def wrong(self) -> str:
        """What is wrong, when, and whose patch that is."""
        return pages.bug(self.patch) + (f"; {self.beside}" if self.beside else "") + registry.credit(self.plugin)

    @property
    def fixed_in(self) -> str:
        """The release, or why there is none, in words."""
        return self.fixed or ("no release yet" if self.read else "unknown")

    @property
    def facts(self) -> str:
        """Harm and fix: "hang; fixed in 1.14.0"."""
        return "; ".join(filter(None, (self.patch.harm, f"fixed in {self.fixed}" if self.fixed else self.fixed_in)))


@dataclass(frozen=True)
class Audited:
    """A pin of a framework that patches are for.

    Attributes:
        pin: as it was read.
        bugs: None where none was looked up, or none was found in a version that the record does not reach.
        reason: why it was not looked up, or not as far as the newest release read; empty where it was.
        newest_read: that release, where the version is newer.
        still_open: the bugs that it has.
        excluded: bugs of this version that cannot concern the run whose configuration was given, each with the reason.
    """

    pin: Pin
    bugs: tuple[Bug, ...] | None
    reason: str = ""
    newest_read: str | None = None
    still_open: tuple[Bug, ...] = ()
    excluded: tuple[tuple[Bug, str], ...] = ()

    def within(self, run: RunConfig) -> Audited:
        """Without the bugs that cannot concern the run."""
        if self.bugs is None:
            return self
        reasons = [(bug, run.excludes(bug.patch)) for bug in self.bugs]
        excluded = tuple((bug, reason) for bug, reason in reasons if reason)
        return replace(self, bugs=tuple(bug for bug, reason in reasons if not reason), excluded=excluded)


class Gap(NamedTuple):
    """What was not looked up.

    Attributes:
        place: as a `Pin` has it; of a file that could not be read, the file.
        text: what and why.
        name, version: of the distribution, where the place names one.
    """

    place: str
    text: str
    name: str = ""
    version: str | None = None


@dataclass(frozen=True)
class Findings:
    """The answer for all that was given.

    Attributes:
        files: what was given; empty for this environment.
        named: how many pins of whatever distribution there are.
        audited: those of frameworks.
        unread: the entries that were not understood.
        not_read: files of which nothing is known.
        run: the configuration of the run that is asked about, if it was given.
        failing: pairs of pins that are known to fail at an import.
    """

    files: Sequence[str]
    named: int
    audited: Sequence[Audited]
    unread: Sequence[Unread]
    not_read: Sequence[Gap]
    run: RunConfig | None = None
    failing: Sequence[Failing] = ()

    @cached_property
    def with_bugs(self) -> list[tuple[Audited, Bug]]:
        """The worst harm first."""
        found = [(each, bug) for each in self.audited for bug in each.bugs or ()]
        return sorted(found, key=lambda one: pages.by_harm(one[1].patch))

    @cached_property
    def excluded(self) -> list[tuple[Audited, Bug, str]]:
        """Bugs that cannot concern this run, each with the reason; the worst harm first."""
        found = [(each, bug, reason) for each in self.audited for bug, reason in each.excluded]
        return sorted(found, key=lambda one: pages.by_harm(one[1].patch))

    @cached_property
    def not_looked_up(self) -> list[Audited]:
        """The pins of frameworks that were not, or not as far as the newest release read."""
        return [each for each in self.audited if each.reason]

    @property
    def shown_unread(self) -> Sequence[Unread]:
        """The first of the entries that were not understood."""
        return self.unread[:_SHOWN]

    @property
    def gaps(self) -> list[Gap]:
        """Each pin that was not looked up and each entry that was not understood, up to a number of these."""
        gaps = []
        for each in self.not_looked_up:
            name, version = each.pin.name, each.pin.version if each.newest_read else None
            what = f"{name} {version}" if version else name
            text = f"{what} ({each.pin.place}) was not looked up: {each.reason}"
            gaps.append(Gap(each.pin.place, text, name, version))
        gaps += [Gap(each.place, f"{each.place}: {each.why}") for each in self.shown_unread]
        more = self.unread[_SHOWN:]
        return gaps + [Gap(each.place, f"{len(more)} more were not understood") for each in more[:1]]

    @property
    def newer(self) -> int:
        """How many of these are newer than what was read."""
        return sum(each.newest_read is not None for each in self.not_looked_up)

    @property
    def status(self) -> int:
        """0 only where everything that names a framework was looked up, and has no known bug."""
        return 2 if self.not_read else int(bool(self.with_bugs or self.failing or self.not_looked_up or self.unread))

    def location(self, place: str) -> tuple[str | None, int | None]:
        """The file and the line of a place; no file for standard input and this environment."""
        if not self.files or not place:
            return None, None
        file, line = place, None
        if place not in self.files:  # a file's own name may end in a number
            numbered = re.fullmatch(r"(.*)(?::|, entry )(\d+)", place, re.DOTALL)
            if numbered is not None:
                file, line = numbered[1], int(numbered[2]) if place[numbered.end(1)] == ":" else None
        return (None, line) if file == "standard input" and "-" in self.files else (file, line)

    def in_sum(self) -> list[str]:
        """Sentences: how much of what was given was looked up, and what was found."""
        return [self._counted(), *self._found(), *self._failing(), *self._of_this_run()]

    def _counted(self) -> str:
        of_ours, not_up = self.audited, self.not_looked_up
        why = [f"{self.newer} newer than what was read"] if self.newer else []
        why += [f"{len(not_up) - self.newer} without a version that can be looked up"] * (len(not_up) > self.newer)
        why += [f"{plural(len(self.unread), 'entry', 'entries')} not understood"] if self.unread else []
        reasons = f": {', '.join(why)}" if why else ""
        if not of_ours:
            return f"None of the {plural(self.named, 'package')} named is supported{reasons}."
        if self.with_bugs or self.failing or self.excluded or why:
            checked = f"Checked {len(of_ours) - len(not_up)} of {plural(len(of_ours), 'supported package')}"
            return f"{checked}, of {self.named} named{reasons}."
        return f"No known bugs found in {plural(len(of_ours), 'supported package')}, of {self.named} named."

    def _found(self) -> list[str]:
        if not self.with_bugs:
            return []
        patches = {bug.patch.name: bug.patch for _, bug in self.with_bugs}
        names = {each.pin.name for each, _ in self.with_bugs}
        said = pages.counted(patches.values())
        found = f"Found {plural(len(patches), 'known bug')} in {plural(len(names), 'package')}"
        return [f"{found}{f': {said}' if said else ''}."]

    def _failing(self) -> list[str]:
        which = dict.fromkeys((each.pin.name, each.other[0]) for each in self.failing)
        named = ", ".join(f"{caller} with {other}" for caller, other in which)
        return [f"Known to fail at an import: {named}."] if which else []

    def _of_this_run(self) -> list[str]:
        if self.run is None:
            return []
        excluded = {bug.patch.name for _, bug, _ in self.excluded}
        left = {bug.patch.name for _, bug in self.with_bugs}
        said = [f"Its configuration excludes {plural(len(excluded), 'known bug')}: {', '.join(sorted(excluded))}."]
        return [
            *(said if excluded else ["Its configuration excludes no known bug."]),
            *([f"{len(left)} may affect this run."] if left else []),
        ]

    @property
    def notes(self) -> Sequence[str]:
        """What of the run's configuration is not clear as a whole."""
        return self.run.notes if self.run else ()


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
    pins = list(pins)
    named: dict[str, set[str | None]] = {}
    for pin in pins:
        named.setdefault(_BUILD_OF.get(pin.name, pin.name), set()).add(pin.version)
    wanted = [pin for pin in pins if pin.name in by_name]
    if len(wanted) > _MOST:
        raise PinsError(f"what was given names frameworks {len(wanted)} times: expected {_MOST} at most")
    return [_audited(pin, by_name[pin.name], named) for pin in wanted]


_BUILD_OF = {build: name for name, builds in installed.OTHER_BUILDS.items() for build in builds}


def failing(pins: Iterable[Pin], audited: Iterable[Audited]) -> list[Failing]:
    """Pairs of pins that are known to fail at an import, without what a bug of these releases says already."""
    told: dict[Pin, str] = {}
    for each in audited:
        beside = [bug.patch for bug in each.bugs or () if bug.beside]
        told[each.pin] = "\n".join(signature.message for patch in beside for signature in patch.signatures)
    return pairs.failing(pins, told)


def that_count(unread: Iterable[Unread], registered: Sequence[Registered]) -> list[Unread]:
    """Without those that would count only if they named a framework: by its distribution or its import name."""
    names = {name for item in registered for name in _names(item.patch)}
    spelled = "|".join(re.escape(name).replace(r"\-", "[-_.]") for name in sorted(names))
    named = re.compile(rf"(?<![A-Za-z0-9_])(?:{spelled})(?![A-Za-z0-9_])", re.IGNORECASE)
    return [each for each in unread if each.mention is None or (names and named.search(each.mention))]


def _names(patch: KnownBug) -> set[str]:
    return {canonicalize_name(patch.distribution), *(module.partition(".")[0] for module in patch.modules)}


def _audited(pin: Pin, items: list[Registered], named: Named) -> Audited:
    if pin.version is None:
        return Audited(pin, None, pin.note or "no version is named")
    try:
        version = Version(pin.version)
    except ValueError:  # InvalidVersion, or more digits than Python converts
        return Audited(pin, None, f"{pin.version!r:.100} is no version of PEP 440")
    found = [(item, _had(item.patch, version, named)) for item in items]
    bugs = tuple(_bug(item, beside) for item, beside in found if beside is not None)
    # A local version (1.5.1+cu128) is the release that it is made of.
    beyond = [bug for bug in map(_bug, items) if bug.read and Version(version.public) > Version(bug.read)]
    if not beyond:
        return Audited(pin, bugs)
    newest = max((bug.read for bug in beyond if bug.read), key=Version)
    still_open = tuple(bug for bug in beyond if bug.fixed is None)
    return Audited(pin, bugs or None, _newer(newest, still_open), newest, still_open)


def _newer(newest: str, still_open: Sequence[Bug]) -> str:
    count = f"{plural(len(still_open), 'known bug') if still_open else 'no known bugs'} without a fix"
    names = f": {', '.join(bug.patch.name + registry.credit(bug.plugin) for bug in still_open)}" if still_open else ""
    return f"newer than {newest}, the newest release read, which has {count}{names}"


def _had(patch: KnownBug, version: Version, named: Named) -> str | None:
    """Beside what a release has a bug: empty where that does not matter; None where it does not have the bug."""
    guards = [variant.guard for variant in patch.variants]
    affected = [guard for guard in guards if versions.judge(guard, str(version)).verdict is Verdict.AFFECTED]
    without = releases().get(patch.name, {}).get("without", ())
    if not affected or any(Version(first) <= version <= Version(last) for first, last in without):
        return None
    (guard,) = affected  # ranges of variants have no version in common
    return _beside(guard.co_installed, named, isinstance(patch, Patch)) if guard.co_installed else ""


def _beside(other: CoInstalled, named: Named, repaired: bool) -> str | None:
    """Which of the pins named makes a bug of two releases one; where no version is named, which would."""
    found = named.get(canonicalize_name(other.distribution), {None})
    judged = {version: versions.judge(Guard(other.distribution, other.versions), version).verdict for version in found}
    affected = [version for version, verdict in judged.items() if verdict is Verdict.AFFECTED]
    if affected:
        here = f"beside {other.distribution} {', '.join(sorted(map(str, affected)))}, as here"
        first = next((pin.version for pin in SpecifierSet(other.versions) if pin.operator == ">="), None)
        return here + (f" ({'without the patch: ' * repaired}pin {other.distribution}<{first})" if first else "")
    if Verdict.UNKNOWN in judged.values():
        return f"only beside {co_installed_text(other)}, of which no version is named here"
    return None


def _bug(item: Registered, beside: str = "") -> Bug:
    known = releases().get(item.patch.name)
    if known is None:
        sign, bound = ranges.end(variant.guard.versions for variant in item.patch.variants) or ("", None)
        known = {"fixed": bound} if sign == "<" else {"read": bound}
    return Bug(item.patch, item.plugin, known.get("fixed"), known.get("read"), beside)


@cache
def releases() -> dict[str, Any]:
    """The record of releases, as it is shipped (release_record/shipped.py has the keys)."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("releases.json").read_text(encoding="utf-8"))
    return found
