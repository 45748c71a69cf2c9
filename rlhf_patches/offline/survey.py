"""Compare the code of all releases of a distribution with the ranges that a patch claims.

A patch's author runs this before writing a range, and again after a new upstream release. The facts (`facts`) do not
use the version; the decision (`evaluate`) is that of `check`.
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
        version: the version in the release's metadata.
        status, reason: the result of ``check``.
        codes: the result of each variant's shape guard.
        known: the result of `facts.is_known`.
    """

    version: str | None
    status: Status
    reason: str
    codes: tuple[Code, ...]
    known: bool


class Looked(NamedTuple):
    """One release.

    Attributes:
        version, yanked: the index's data.
        file: the file that was read; empty if there is none.
        problem: why the release could not be judged; empty if it was.
        failed: whether another try may succeed.
        judged: the results by patch name.
    """

    version: Version
    yanked: str | None
    file: str = ""
    problem: str = ""
    failed: bool = False
    judged: dict[str, Judged] = {}  # noqa: RUF012 - of a tuple


def chosen(releases: Iterable[Published], specifier: SpecifierSet, pre: bool) -> list[Published]:
    """The releases in a range; pre-releases by pip's rule: if requested or named, or if there are no others."""
    by_version = {release.version: release for release in releases}
    return [by_version[version] for version in specifier.filter(sorted(by_version), prereleases=pre or None)]


def look(
    index: Index, name: str, releases: Iterable[Published], registered: Sequence[Registered], cache: Path | None
) -> Iterator[Looked]:
    """Fetch and judge each release.

    Args:
        index: the index.
        name: the distribution, normalized.
        releases: the releases to judge.
        registered: the patches.
        cache: the folder where files are kept; without it, each file is deleted after reading.
    """
    for release in releases:
        if release.file is None:
            problem = "the index has neither a wheel nor an sdist of this release"
            yield Looked(release.version, release.yanked, problem=problem)
            continue
        with tempfile.TemporaryDirectory(prefix="rlhf-patches-") as temporary:
            folder = Path(temporary) if cache is None else download.place(cache, name, str(release.version))
            file = release.file.filename
            try:
                rows = confined.ask(str(index.fetch(release.file, folder)), lambda each: _judged(each, registered))
            except (IndexProblem, ReleaseError) as error:
                problem = _without(folder, str(error))
                yield Looked(release.version, release.yanked, file, problem, failed=True)
                continue
        judged = {name: _read({**one, "reason": _without(folder, one["reason"])}) for name, one in rows.items()}
        yield Looked(release.version, release.yanked, file, judged=judged)


def _without(folder: Path, text: str) -> str:
    """The text without the file's folder."""
    return text.replace(f"{folder}/", "")


def _judged(release: Release, registered: Sequence[Registered]) -> dict[str, Any]:
    rows = {}
    with memory.parsed_once():
        for item in registered:
            (row,) = evaluate.check(release, [item], by_name=True)
            codes = [{**asdict(code), "why": confined.short(code.why)} for code in facts.examine(release, item.patch)]
            texts = {"version": confined.short(row.version), "reason": confined.short(row.reason)}
            known = facts.is_known(release, item.patch)
            rows[row.name] = {**texts, "status": row.status.value, "codes": codes, "known": known}
    return rows


def _read(row: dict[str, Any]) -> Judged:
    codes = [Code(**{**code, "fingerprints": tuple(code["fingerprints"])}) for code in row["codes"]]
    return Judged(row["version"], Status(row["status"]), row["reason"], tuple(codes), row["known"])


# ------------------------------------------------------------------------------------------- one patch


@dataclass(frozen=True)
class Survey:
    """One patch and every selected release, oldest first.

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
        """Whether any release that was read has, or should have, the patch's modules."""
        return any(
            facts.counting(self.patch, one.codes).state != facts.NO_MODULE or self.disagreement(one)
            for _, one in self.known
        )

    @property
    def disagreements(self) -> list[tuple[Looked, str]]:
        """The releases whose ranges and code disagree, or to which the patch cannot be applied."""
        return [(each, text) for each, one in self.known if (text := self.disagreement(one))]

    def disagreement(self, one: Judged) -> str:
        """The problem; empty if there is none."""
        number = facts.claimed(self.patch, one.version)
        there = facts.recognized(self.patch, one.codes)
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
        """The range that contains a release; empty if none does."""
        number = facts.claimed(self.patch, one.version)
        return "" if number is None else self.patch.variants[number].guard.versions or "every version"

    def suggested(self) -> list[list[str]]:
        """For each variant, the ranges of exactly the releases with its shape; empty if none has it."""
        return [self._ranges(number) for number in range(len(self.patch.variants))]

    def _ranges(self, number: int) -> list[str]:
        # A range does not claim an unreadable release at one of its bounds.
        has = [
            (
                each.version,
                None if each.problem else number in facts.recognized(self.patch, each.judged[self.patch.name].codes),
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
        """For each target of a wrap or a replacement, the fingerprints with their releases, as a patch lists them.

        The patch's remark on the releases follows a colon.
        """
        listed = facts.fingerprint_texts(self.patch)
        targets = dict.fromkeys(target for target, _ in listed)
        versions = [str(each.version) for each, _ in self.known]
        by_target: dict[str, dict[str, str]] = {}
        for target in targets:
            by_place: dict[str, list[int]] = {}
            for place, (_, one) in enumerate(self.known):
                for fingerprint in sorted(facts.found_fingerprints(self.patch, one.codes, target)):
                    by_place.setdefault(fingerprint, []).append(place)
            by_target[target] = {
                each: ", ".join(_spans(places, versions)) + "".join(listed.get((target, each), "").partition(":")[1:])
                for each, places in by_place.items()
            }
        return by_target

    def to_dict(self) -> dict[str, Any]:
        """All results, in JSON values."""
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
    """The range from one release to another, up to the next release if that is known not to have the shape."""
    if last + 1 < len(has) and has[last + 1][1] is False:
        return f">={has[first][0]},<{has[last + 1][0]}"
    return f"=={has[first][0]}" if first == last else f">={has[first][0]},<={has[last][0]}"


def _spans(places: Sequence[int], versions: Sequence[str]) -> Iterator[str]:
    """``FIRST to LAST`` of each stretch of neighboring releases."""
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
    """Judge releases for all patches of one distribution; ``on_each`` is called after each release."""
    looked = []
    for each in look(index, name, releases, registered, cache):
        looked.append(each)
        on_each()
    return [Survey(item.patch, tuple(looked)) for item in registered]
