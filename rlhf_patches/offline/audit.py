"""The known bugs of a set of pins, the patch and the release that repair each, from versions alone.

The answer includes pins that were not looked up: pins without a version, and versions newer than the newest reviewed.
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
from . import allowed, names, pairs
from .pairs import Failing
from .pins import COMMAND_LINE, Pin, PinsError, Unread
from .run_config import RunConfig

_MOST = 1000
"""The most pins of frameworks; an environment has one of each, and each has a page of bugs."""
Named = Mapping[str, set[str | None]]
"""By distribution, the versions that pins name; None for a pin without a version."""
_SHOWN = 20  # unparsed entries that are listed, each with its line


@dataclass(frozen=True)
class Bug:
    """A known bug of one release.

    Attributes:
        patch: the patch that repairs the bug at run time, or the advice if no patch does.
        plugin: the distribution of the patch or advice.
        fixed: the first release without the bug; None if the record knows none.
        read: the newest reviewed release; None if unknown. A plugin's patch has no record; its range gives both:
            ``<1.5`` names the release with the fix, ``<=1.9`` the newest reviewed release.
        beside: the other distribution that the bug requires, and whether a pin names it; empty if it requires none.
    """

    patch: KnownBug
    plugin: str
    fixed: str | None
    read: str | None
    beside: str = ""

    @property
    def repaired_by(self) -> str | None:
        """The distribution of the patch; None for an advice."""
        return self.plugin if isinstance(self.patch, Patch) else None

    @property
    def wrong(self) -> str:
        """The bug, its condition, and the origin of its patch."""
        return pages.bug(self.patch) + (f"; {self.beside}" if self.beside else "") + registry.credit(self.plugin)

    @property
    def fixed_in(self) -> str:
        """The release with the fix, or words for none."""
        return self.fixed or ("no release yet" if self.read else "unknown")

    @property
    def facts(self) -> str:
        """Harm and fix: "hang; fixed in 1.14.0"."""
        return "; ".join(filter(None, (self.patch.harm, f"fixed in {self.fixed}" if self.fixed else self.fixed_in)))


@dataclass(frozen=True)
class Audited:
    """A pin of a supported framework.

    Attributes:
        pin: the pin.
        bugs: None if no bug was looked up, or if a version newer than the record has none.
        reason: why the pin was not looked up, or is newer than the newest reviewed release; empty if it was looked up.
        newest_read: the newest reviewed release, if the version is newer.
        still_open: the bugs of the newest reviewed release.
        excluded: bugs of this version that cannot affect the run with the given configuration, each with the reason.
    """

    pin: Pin
    bugs: tuple[Bug, ...] | None
    reason: str = ""
    newest_read: str | None = None
    still_open: tuple[Bug, ...] = ()
    excluded: tuple[tuple[Bug, str], ...] = ()

    def within(self, run: RunConfig) -> Audited:
        """A copy without the bugs that cannot affect the run."""
        if self.bugs is None:
            return self
        reasons = [(bug, run.excludes(bug.patch)) for bug in self.bugs]
        excluded = tuple((bug, reason) for bug, reason in reasons if reason)
        return replace(self, bugs=tuple(bug for bug, reason in reasons if not reason), excluded=excluded)


class Gap(NamedTuple):
    """An entry or a file that was not looked up.

    Attributes:
        place: the place, as in `Pin`; for an unreadable file, the file.
        text: the entry and the reason.
        name, version: the distribution, if the place names one.
    """

    place: str
    text: str
    name: str = ""
    version: str | None = None


@dataclass(frozen=True)
class Findings:
    """The findings for all files.

    Attributes:
        files: the given files; empty for this environment.
        named: the number of pins, of any distribution.
        audited: the pins of frameworks.
        unread: the entries that were not understood.
        not_read: the files that could not be read.
        run: the configuration of the run, if given.
        failing: pairs of pins whose import is known to fail.
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
        """The bugs and their pins, the worst harm first."""
        bugs = [(each, bug) for each in self.audited for bug in each.bugs or ()]
        return sorted(bugs, key=lambda one: pages.by_harm(one[1].patch))

    @cached_property
    def excluded(self) -> list[tuple[Audited, Bug, str]]:
        """Bugs that cannot affect this run, each with the reason; the worst harm first."""
        bugs = [(each, bug, reason) for each in self.audited for bug, reason in each.excluded]
        return sorted(bugs, key=lambda one: pages.by_harm(one[1].patch))

    @cached_property
    def not_looked_up(self) -> list[Audited]:
        """The pins of frameworks that were not looked up, or are newer than the newest reviewed release."""
        return [each for each in self.audited if each.reason]

    @property
    def shown_unread(self) -> Sequence[Unread]:
        """The first entries that were not understood."""
        return self.unread[:_SHOWN]

    @property
    def gaps(self) -> list[Gap]:
        """Each pin that was not looked up and each entry that was not understood, up to `_SHOWN` of the latter."""
        gaps = []
        for each in self.not_looked_up:
            name, version = each.pin.name, each.pin.version if each.newest_read else None
            what = f"{name} {version}" if version else name
            text = f"{what} ({each.pin.place}) was not looked up: {each.reason}"
            gaps.append(Gap(each.pin.place, text, name, version))
        gaps += [Gap(each.place, f"{each.place}: {each.why}") for each in self.shown_unread]
        more = self.unread[_SHOWN:]
        return gaps + [Gap(each.place, f"{len(more)} more entries were not understood") for each in more[:1]]

    @property
    def newer(self) -> int:
        """The number of pins newer than the newest reviewed release."""
        return sum(each.newest_read is not None for each in self.not_looked_up)

    @property
    def status(self) -> int:
        """0 only if every entry that names a framework was looked up and has no known bug."""
        return 2 if self.not_read else int(bool(self.with_bugs or self.failing or self.not_looked_up or self.unread))

    def location(self, place: str) -> tuple[str | None, int | None]:
        """The file and the line of a place; no file for standard input and this environment."""
        if not self.files or place in ("", COMMAND_LINE):
            return None, None
        file, line = place, None
        if place not in self.files:  # a file name may end in a number
            numbered = re.fullmatch(r"(.*)(?::|, entry )(\d+)", place, re.DOTALL)
            if numbered is not None:
                file, line = numbered[1], int(numbered[2]) if place[numbered.end(1)] == ":" else None
        return (None, line) if file == "standard input" and "-" in self.files else (file, line)

    def in_sum(self) -> list[str]:
        """Sentences: the number of entries looked up, and the findings."""
        return [self._counted(), *self._bugs(), *self._failing(), *self._of_this_run()]

    def _counted(self) -> str:
        of_ours, not_up = self.audited, self.not_looked_up
        why = [f"{self.newer} newer than the newest release reviewed"] if self.newer else []
        why += [f"{len(not_up) - self.newer} without a version that can be looked up"] * (len(not_up) > self.newer)
        why += [f"{plural(len(self.unread), 'entry', 'entries')} not understood"] if self.unread else []
        reasons = f": {', '.join(why)}" if why else ""
        if not of_ours:
            return f"None of the {plural(self.named, 'package')} named is supported{reasons}."
        if self.with_bugs or self.failing or self.excluded or why:
            checked = f"Checked {len(of_ours) - len(not_up)} of {plural(len(of_ours), 'supported package')}"
            return f"{checked}, of {self.named} named{reasons}."
        return f"No known bugs found in {plural(len(of_ours), 'supported package')}, of {self.named} named."

    def _bugs(self) -> list[str]:
        if not self.with_bugs:
            return []
        patches = {bug.patch.name: bug.patch for _, bug in self.with_bugs}
        packages = {each.pin.name for each, _ in self.with_bugs}
        by_harm = pages.counted(patches.values())
        count = f"Found {plural(len(patches), 'known bug')} in {plural(len(packages), 'package')}"
        return [f"{count}{f': {by_harm}' if by_harm else ''}."]

    def _failing(self) -> list[str]:
        which = dict.fromkeys((each.pin.name, each.other[0]) for each in self.failing)
        named = ", ".join(f"{caller} with {other}" for caller, other in which)
        return [f"Known to fail at an import: {named}."] if which else []

    def _of_this_run(self) -> list[str]:
        if self.run is None:
            return []
        excluded = {bug.patch.name for _, bug, _ in self.excluded}
        left = {bug.patch.name for _, bug in self.with_bugs}
        which = [f"The configuration excludes {plural(len(excluded), 'known bug')}: {', '.join(sorted(excluded))}."]
        return [
            *(which if excluded else ["The configuration excludes no known bug."]),
            *([f"{len(left)} may affect this run."] if left else []),
        ]

    @property
    def notes(self) -> Sequence[str]:
        """Parts of the run's configuration that cannot be determined."""
        return self.run.notes if self.run else ()


def audit(pins: Iterable[Pin], registered: Sequence[Registered]) -> list[Audited]:
    """Look up every pin of a supported framework; skip others.

    Args:
        pins: the pins of files and environments; equal pins of several places remain separate.
        registered: the patches.

    Returns:
        one entry per pin, in their order.

    Raises:
        PinsError: there are more than `_MOST` pins of frameworks.
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
        raise PinsError(f"the files name frameworks {len(wanted)} times: expected {_MOST} at most")
    return [_audited(pin, by_name[pin.name], named) for pin in wanted]


_BUILD_OF = {build: name for name, builds in installed.OTHER_BUILDS.items() for build in builds}


def failing(pins: Iterable[Pin], audited: Iterable[Audited]) -> list[Failing]:
    """Pairs of pins whose import is known to fail, without failures that a known bug of these releases reports."""
    reported: dict[Pin, str] = {}
    for each in audited:
        beside = [bug.patch for bug in each.bugs or () if bug.beside]
        reported[each.pin] = "\n".join(signature.message for patch in beside for signature in patch.signatures)
    return pairs.failing(pins, reported)


def that_count(unread: Iterable[Unread], registered: Sequence[Registered]) -> list[Unread]:
    """The entries that count: some count only if they name a framework, by its distribution or import name."""
    ours = {name for item in registered for name in _names(item.patch)}
    spelled = "|".join(re.escape(name).replace(r"\-", "[-_.]") for name in sorted(ours))
    named = re.compile(rf"(?<![A-Za-z0-9_])(?:{spelled})(?![A-Za-z0-9_])", re.IGNORECASE)
    return [each for each in unread if each.mention is None or (ours and named.search(each.mention))]


def _names(patch: KnownBug) -> set[str]:
    name = canonicalize_name(patch.distribution)
    of_conda = (each for each, distribution in names.CONDAS.items() if distribution == name)
    return {name, *of_conda, *(module.partition(".")[0] for module in patch.modules)}


def misspelled(pins: Iterable[Pin], registered: Sequence[Registered]) -> list[Unread]:
    """Pins whose name is nearly that of a framework which no pin names."""
    pins = list(pins)
    known = sorted({canonicalize_name(item.patch.distribution) for item in registered} - {pin.name for pin in pins})
    meant = ((pin, names.meant(pin.name, known)) for pin in pins if pin.name not in _BUILD_OF)
    return [
        Unread(pin.place, f"{pin.name} is no supported package, but {name} is: a mistake?")
        for pin, name in meant
        if name
    ]


def _audited(pin: Pin, items: list[Registered], named: Named) -> Audited:
    if pin.version is None:
        return Audited(pin, None, f"{pin.note or 'it has no version'}{_allowed(pin, items, named)}")
    try:
        version = Version(pin.version)
    except ValueError:  # InvalidVersion, or more digits than Python converts
        return Audited(pin, None, f"{pin.version!r:.100} is no PEP 440 version")
    had = [(item, _had(item.patch, version, named)) for item in items]
    bugs = tuple(_bug(item, beside) for item, beside in had if beside is not None)
    # A local version (1.5.1+cu128) counts as its public release.
    beyond = [bug for bug in map(_bug, items) if bug.read and Version(version.public) > Version(bug.read)]
    if not beyond:
        return Audited(pin, bugs)
    newest = max((bug.read for bug in beyond if bug.read), key=Version)
    still_open = tuple(bug for bug in beyond if bug.fixed is None)
    return Audited(pin, bugs or None, _newer(newest, still_open), newest, still_open)


def _allowed(pin: Pin, items: list[Registered], named: Named) -> str:
    """The bugs of every release that a range allows, and of the newest, which pip installs."""
    releases = allowed.reviewed(pin.name, pin.allows) if pin.allows is not None else ()
    if not releases or pin.allows is None:
        return ""
    of_each = [
        {item.patch.name for item in items if _had(item.patch, Version(version), named) == ""} for version in releases
    ]
    always, last = set.intersection(*of_each), of_each[-1]
    which = "" if allowed.is_reviewed(pin.name, pin.allows) else " reviewed"
    every = f"; every{which} release that this allows has {', '.join(sorted(always))}" if always else ""
    more = (", ".join(sorted(last - always)) + ", too" * bool(always)) if last - always else "no other known bug"
    newest = f"; the newest{which} that it allows ({releases[-1]}) has {more if last else 'no known bug'}"
    return every + newest


def _newer(newest: str, still_open: Sequence[Bug]) -> str:
    count = f"{plural(len(still_open), 'known bug') if still_open else 'no known bugs'} without a fix"
    which = f": {', '.join(bug.patch.name + registry.credit(bug.plugin) for bug in still_open)}" if still_open else ""
    return f"newer than {newest}, the newest release reviewed, which has {count}{which}"


def _had(patch: KnownBug, version: Version, named: Named) -> str | None:
    """The other distribution that a release's bug requires: empty if none; None if the release is not affected."""
    guards = [variant.guard for variant in patch.variants]
    affected = [guard for guard in guards if versions.judge(guard, str(version)).verdict is Verdict.AFFECTED]
    without = releases().get(patch.name, {}).get("without", ())
    if not affected or any(Version(first) <= version <= Version(last) for first, last in without):
        return None
    (guard,) = affected  # the ranges of variants do not overlap
    return _beside(guard.co_installed, named, isinstance(patch, Patch)) if guard.co_installed else ""


def _beside(other: CoInstalled, named: Named, repaired: bool) -> str | None:
    """The pin that a bug of two releases requires; without a pinned version, the versions that it requires."""
    pinned = named.get(canonicalize_name(other.distribution), {None})
    judged = {version: versions.judge(Guard(other.distribution, other.versions), version).verdict for version in pinned}
    affected = [version for version, verdict in judged.items() if verdict is Verdict.AFFECTED]
    if affected:
        here = f"with {other.distribution} {', '.join(sorted(map(str, affected)))}, which is pinned"
        first = next((pin.version for pin in SpecifierSet(other.versions) if pin.operator == ">="), None)
        return here + (f" ({'without the patch: ' * repaired}pin {other.distribution}<{first})" if first else "")
    if Verdict.UNKNOWN in judged.values():
        return f"only with {co_installed_text(other)}, whose version is not pinned"
    return None


def _bug(item: Registered, beside: str = "") -> Bug:
    known = releases().get(item.patch.name)
    if known is None:
        sign, bound = ranges.end(variant.guard.versions for variant in item.patch.variants) or ("", None)
        known = {"fixed": bound} if sign == "<" else {"read": bound}
    return Bug(item.patch, item.plugin, known.get("fixed"), known.get("read"), beside)


@cache
def releases() -> dict[str, Any]:
    """The record of releases as shipped (release_record/shipped.py has the keys)."""
    shipped: dict[str, Any] = json.loads(files(__package__).joinpath("releases.json").read_text(encoding="utf-8"))
    return shipped
