"""What all releases of a distribution have of a patch's bug, against the ranges that the patch claims.

The patch's author asks this before a range is written, and again when upstream has released. Facts (`facts`) and
decision (`evaluate`) are found apart: the one without the version, the other as `check` finds it.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..definitions.bug import KnownBug
from ..definitions.registry import Registered
from ..definitions.status import Status
from ..guards import memory
from . import confined, download, evaluate, facts
from .archive import Release
from .bounded_http import IndexProblem
from .facts import Code
from .index import Index, Published
from .members import ReleaseError

_MOST_HOLES = 5  # releases that a suggested range leaves out one by one


class Judged(NamedTuple):
    """One patch in one release.

    Attributes:
        version: what the release's metadata says.
        status, reason: those of ``check``.
        codes: what the shape guard of each variant has found.
        known: `facts.is_known`.
    """

    version: str | None
    status: Status
    reason: str
    codes: tuple[Code, ...]
    known: bool


class Looked(NamedTuple):
    """One release.

    Attributes:
        version, yanked: as the index has them.
        file: what was read, empty where there is nothing.
        problem: why nothing is known of it, empty where something is.
        failed: whether that may be otherwise another time.
        judged: by the patch's name.
    """

    version: Version
    yanked: str | None
    file: str = ""
    problem: str = ""
    failed: bool = False
    judged: dict[str, Judged] = {}  # noqa: RUF012 - of a tuple


def chosen(releases: Iterable[Published], specifier: SpecifierSet, pre: bool) -> list[Published]:
    """Those in a range; pre-releases as pip has it: if they are asked for or named, or if there is nothing else."""
    by_version = {release.version: release for release in releases}
    return [by_version[version] for version in specifier.filter(sorted(by_version), prereleases=pre or None)]


def look(
    index: Index, name: str, releases: Iterable[Published], registered: Sequence[Registered], cache: Path | None
) -> Iterator[Looked]:
    """Look at one release after the other.

    Args:
        index: where they come from.
        name: the distribution, normalised.
        releases: those to look at.
        registered: the patches.
        cache: where the files stay; without, each is deleted when it has been read.
    """
    for release in releases:
        if release.file is None:
            yield Looked(release.version, release.yanked, problem="the index has neither a wheel nor an sdist of it")
            continue
        with tempfile.TemporaryDirectory(prefix="rlhf-patches-") as temporary:
            folder = Path(temporary) if cache is None else download.place(cache, name, str(release.version))
            file = release.file.filename
            try:
                said = confined.ask(str(index.fetch(release.file, folder)), lambda each: _judged(each, registered))
            except (IndexProblem, ReleaseError) as error:
                problem = _without(folder, str(error))
                yield Looked(release.version, release.yanked, file, problem, failed=True)
                continue
        judged = {name: _read({**one, "reason": _without(folder, one["reason"])}) for name, one in said.items()}
        yield Looked(release.version, release.yanked, file, judged=judged)


def _without(folder: Path, text: str) -> str:
    """A text that is the same wherever the file lay."""
    return text.replace(f"{folder}/", "")


def _judged(release: Release, registered: Sequence[Registered]) -> dict[str, Any]:
    found = {}
    with memory.parsed_once():
        for item in registered:
            (row,) = evaluate.check(release, [item], by_name=True)
            codes = [{**asdict(code), "why": confined.short(code.why)} for code in facts.examine(release, item.patch)]
            texts = {"version": confined.short(row.version), "reason": confined.short(row.reason)}
            known = facts.is_known(release, item.patch)
            found[row.name] = {**texts, "status": row.status.value, "codes": codes, "known": known}
    return found


def _read(said: dict[str, Any]) -> Judged:
    codes = [Code(**{**code, "fingerprints": tuple(code["fingerprints"])}) for code in said["codes"]]
    return Judged(said["version"], Status(said["status"]), said["reason"], tuple(codes), said["known"])


# ------------------------------------------------------------------------------------------- one patch


@dataclass(frozen=True)
class Survey:
    """One patch, and every release that was chosen, oldest first.

    Attributes:
        patch: the patch.
        looked: the releases.
    """

    patch: KnownBug
    looked: tuple[Looked, ...]

    @property
    def known(self) -> list[tuple[Looked, Judged]]:
        """The releases that could be read."""
        return [(each, each.judged[self.patch.name]) for each in self.looked if not each.problem]

    @property
    def learned(self) -> bool:
        """Whether any release that was read has the patch's modules, or should have."""
        return any(
            facts.counting(self.patch, one.codes).state != facts.NO_MODULE or self.disagreement(one)
            for _, one in self.known
        )

    @property
    def disagreements(self) -> list[tuple[Looked, str]]:
        """The releases of which ranges and code say different things, or to which the patch cannot be put."""
        return [(each, text) for each, one in self.known if (text := self.disagreement(one))]

    def disagreement(self, one: Judged) -> str:
        """What is wrong, empty where nothing is."""
        number = facts.claimed(self.patch, one.version)
        there = facts.recognised(self.patch, one.codes)
        if facts.agrees(self.patch, one.version, one.codes):
            why = one.reason.partition(", but ")[2] or one.reason  # without the version, which each release has its own
            return f"is {one.status}: {why}" if one.status.is_problem else ""
        if number is None:
            return f"has the defect{self._which(there)} and is in no range"
        code = one.codes[number]
        what = f"has the code{self._which(there)}" if there else f"{code.state}: {code.why}"
        return f"is in the range {self.patch.variants[number].guard.versions or 'of all'}, but {what}"

    def _which(self, numbers: Sequence[int]) -> str:
        if len(self.patch.variants) == 1:
            return ""
        return " of " + " and ".join(self.patch.variants[number].guard.versions for number in numbers)

    def claim(self, one: Judged) -> str:
        """The range that has a release; empty where none has."""
        number = facts.claimed(self.patch, one.version)
        return "" if number is None else self.patch.variants[number].guard.versions or "every version"

    def suggested(self) -> list[list[str]]:
        """Of each variant the ranges that are the releases with its shape, and no others; empty where none has it."""
        return [self._ranges(number) for number in range(len(self.patch.variants))]

    def _ranges(self, number: int) -> list[str]:
        # Of a release that could not be read nothing is claimed where it is at a bound.
        has = [
            (
                each.version,
                None if each.problem else number in facts.recognised(self.patch, each.judged[self.patch.name].codes),
            )
            for each in self.looked
        ]
        first = next((place for place, (_, there) in enumerate(has) if there), None)
        if first is None:
            return []
        last = max(place for place, (_, there) in enumerate(has) if there)
        holes = [version for version, there in has[first:last] if there is False]
        if len(holes) <= _MOST_HOLES:
            return [",".join([_span(has, first, last), *(f"!={version}" for version in holes)])]
        read = [(place, there) for place, (_, there) in enumerate(has) if there is not None]
        groups = (list(group) for there, group in itertools.groupby(read, lambda pair: pair[1]) if there)
        return [_span(has, group[0][0], group[-1][0]) for group in groups]

    def fingerprints(self) -> dict[str, dict[str, str]]:
        """Of each target of a wrap or a replacement the fingerprints, each with its releases, as a patch lists them.

        Behind a colon is what the patch says more of them.
        """
        said = facts.fingerprint_texts(self.patch)
        targets = dict.fromkeys(target for target, _ in said)
        versions = [str(each.version) for each, _ in self.known]
        found: dict[str, dict[str, str]] = {}
        for target in targets:
            by_place: dict[str, list[int]] = {}
            for place, (_, one) in enumerate(self.known):
                for fingerprint in sorted(facts.found_fingerprints(self.patch, one.codes, target)):
                    by_place.setdefault(fingerprint, []).append(place)
            found[target] = {
                each: ", ".join(_spans(places, versions)) + "".join(said.get((target, each), "").partition(":")[1:])
                for each, places in by_place.items()
            }
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything, in values that JSON has."""
        return {
            "name": self.patch.name,
            "distribution": self.patch.distribution,
            "ranges": [variant.guard.versions for variant in self.patch.variants],
            "suggested": self.suggested(),
            "agrees": not self.disagreements,
            "fingerprints": self.fingerprints(),
            "releases": [self._row(each) for each in self.looked],
        }

    def _row(self, each: Looked) -> dict[str, Any]:
        row: dict[str, Any] = {"version": str(each.version), "file": each.file or None}
        row |= {"yanked": each.yanked} if each.yanked is not None else {}
        if each.problem:
            return {**row, "problem": each.problem}
        one = each.judged[self.patch.name]
        code = facts.counting(self.patch, one.codes)
        return {
            **row,
            "range": self.claim(one) or None,
            "code": code.state,
            "why": code.why,
            "status": one.status.value,
            "reason": one.reason,
            "known": one.known,
            "disagreement": self.disagreement(one) or None,
        }


def _span(has: Sequence[tuple[Version, bool | None]], first: int, last: int) -> str:
    """The range from one release to another, up to the next one if that is known to be without the shape."""
    if last + 1 < len(has) and has[last + 1][1] is False:
        return f">={has[first][0]},<{has[last + 1][0]}"
    return f"=={has[first][0]}" if first == last else f">={has[first][0]},<={has[last][0]}"


def _spans(places: Sequence[int], versions: Sequence[str]) -> Iterator[str]:
    """``FIRST to LAST`` of each stretch of neighbouring releases."""
    for _, group in itertools.groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        members = [place for _, place in group]
        ends = versions[members[0]], versions[members[-1]]
        yield ends[0] if len(members) == 1 else " to ".join(ends)


def survey(
    index: Index,
    name: str,
    registered: Sequence[Registered],
    releases: Sequence[Published],
    cache: Path | None = None,
    on_each: Callable[[], None] = lambda: None,
) -> list[Survey]:
    """Look at releases for all patches of one distribution; ``on_each`` is called after each release."""
    looked = []
    for each in look(index, name, releases, registered, cache):
        looked.append(each)
        on_each()
    return [Survey(item.patch, tuple(looked)) for item in registered]
