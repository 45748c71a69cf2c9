"""``survey``: compare the ranges of a patch with the code of every release on an index."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ..authoring.ranges import RangeError, move
from ..definitions import registry
from ..definitions.registry import Registered
from ..definitions.words import printable
from ..offline import facts, survey
from ..offline.bounded_http import IndexProblem
from ..offline.index import PYPI, Index
from ..offline.survey import Looked, Survey
from . import catalogue, output
from .command_line import INTERRUPTED, Commands, UsageError, add_output

_MUCH = 4 * 2**30
"""Total bytes of all files from which on a message is logged before fetching."""


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "survey",
        _survey,
        "compare a patch's ranges with the code of every release on PyPI",
        "rlhf-patches survey trl-some-bug --releases '>=1.0'",
    )
    command.add_argument("names", metavar="PATCH", nargs="+", help="a built-in patch or a plugin's")
    add_output(command)
    command.add_argument("--all", action="store_true", help="print a line for each release")
    command.add_argument(
        "--releases", metavar="SPECIFIER", default="", help="read only these releases, for example '>=1.0,<2'"
    )
    command.add_argument("--pre", action="store_true", help="include pre-releases")
    command.add_argument(
        "--write",
        action="store_true",
        help="write the suggested range into the patch's file if the code contradicts it",
    )
    command.add_argument(
        "--cache", metavar="DIR", help="keep the fetched files in DIR (default: delete each after reading)"
    )
    command.add_argument(
        "--index",
        metavar="URL",
        default=os.environ.get("PIP_INDEX_URL") or PYPI,
        help="a package index with the simple API (default: PIP_INDEX_URL, or PyPI)",
    )


def _survey(options: argparse.Namespace) -> int:
    if options.write and options.releases:
        raise UsageError("--write excludes --releases: the bounds of a range depend on all releases")
    if options.cache:
        try:
            Path(options.cache).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--cache {options.cache} cannot be written: {error.strerror}") from error
    registered, failures = registry.load()
    wanted: dict[str, list[Registered]] = {}
    for name in dict.fromkeys(options.names):
        item = catalogue.find(name, registered, failures)
        wanted.setdefault(canonicalize_name(item.patch.distribution), []).append(item)
    try:
        surveys = [each for name, items in wanted.items() for each in _of_one(name, items, options)]
    except IndexProblem as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        output.complain("interrupted; only files in --cache are left")
        return INTERRUPTED
    finally:
        output.complain_of_plugins(failures)
    if options.json:
        print(json.dumps([each.to_dict() for each in surveys], indent=2))
    for each in surveys:
        for one in each.looked:
            if one.failed:
                output.complain(f"{each.patch.name}: {one.version} could not be read: {one.problem}")
        if options.quiet:
            for one, text in each.disagreements:
                output.complain(f"{each.patch.name}: {each.patch.distribution} {one.version} {text}")
        elif not options.json:
            _print(each, options)
        if options.write:
            _write(each)
        if not each.learned:
            output.complain(f"{each.patch.name}: none of these releases has {', '.join(each.patch.modules)}")
    unknown = not all(each.learned for each in surveys) or any(one.failed for each in surveys for one in each.looked)
    return 2 if unknown else int(any(each.disagreements for each in surveys))


def _of_one(name: str, items: list[Registered], options: argparse.Namespace) -> list[Survey]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    try:
        specifier = SpecifierSet(options.releases)
        specifier.contains("0")  # parses the bounds
    except ValueError as error:  # InvalidSpecifier, or more digits than Python converts
        raise UsageError(
            f"--releases {options.releases!r:.100}: expected a PEP 440 specifier, for example '>=1.0,<2'"
        ) from error
    cache = Path(options.cache) if options.cache else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    to = Console(stderr=True)
    index = Index(options.index)
    published = index.releases(name)
    # Ranges also decide about pre-releases.
    releases = survey.chosen(published, specifier, options.pre or options.write)
    if not releases:
        there = f"; the newest is {published[-1].version}" if published else ""
        raise UsageError(f"{index.label} has no release of {name} {specifier}".rstrip() + there)
    size = sum(release.file.size for release in releases if release.file)
    if size >= _MUCH:
        some = "`--releases` selects some" + ("" if cache else ", `--cache` keeps them")
        output.complain(f"{name}: {len(releases)} releases, {size / 2**30:.0f} GiB to fetch; {some}")
    with Progress(*columns, console=to, transient=True, disable=not to.is_terminal) as progress:
        bar = progress.add_task(name, total=len(releases))
        return survey.survey(index, name, items, releases, cache, lambda: progress.advance(bar))


def _print(result: Survey, options: argparse.Namespace) -> None:
    patch, console = result.patch, output.console()
    console.print(printable(f"{patch.name}: {patch.distribution}, {len(result.looked)} releases"), style="bold")
    rows: list[tuple[str, ...]] = [(str(each.version), *_cells(result, each)) for each in result.looked]
    if not options.all:
        rows = list(_folded(rows))
    output.print_table(("RELEASES", "RANGE", "CODE", "STATUS", "NOTE"), [tuple(map(printable, row)) for row in rows])
    console.print()
    console.print(printable(_searched(result)))
    for variant, ranges in zip(patch.variants, result.suggested(), strict=True):
        console.print(printable(_verdict(result, variant.guard.versions, ranges, bool(options.releases))))
    for target, fingerprints in result.fingerprints().items():
        known = {fingerprint for name, fingerprint in facts.fingerprint_texts(patch) if name == target}
        console.print(printable(f"{target}:"))
        console.print("    fingerprints={")
        for fingerprint, releases in fingerprints.items():
            new = "" if fingerprint in known else "  # not in the patch"
            console.print(f'        "{fingerprint}": "{releases}",{new}')
        console.print("    }")
        for fingerprint in sorted(known - fingerprints.keys()):
            console.print(f"    {fingerprint} of the patch is the fingerprint of none of these releases")
    print()


def _write(result: Survey) -> None:
    """Move each range that the code contradicts, if the code suggests exactly one other range."""
    if not result.disagreements:
        return
    if any(one.failed for one in result.looked):
        output.complain(f"{result.patch.name}: no range is moved, because not every release could be read")
        return
    for variant, suggested in zip(result.patch.variants, result.suggested(), strict=True):
        old = variant.guard.versions
        if len(suggested) == 1 and SpecifierSet(suggested[0]) != SpecifierSet(old):
            try:
                file = move(result.patch, old, suggested[0])
            except RangeError as error:
                output.complain(str(error))
            else:
                output.complain(f"{result.patch.name}: {old or 'every version'} became {suggested[0]} in {file}")


def _cells(result: Survey, each: Looked) -> tuple[str, str, str, str]:
    yanked = "" if each.yanked is None else f"yanked ({each.yanked})"
    if each.problem:
        return "-", "-", "-", "; ".join(filter(None, (f"NOT READ: {each.problem}", yanked)))
    one = each.judged[result.patch.name]
    disagreement = result.disagreement(one)
    note = "; ".join(filter(None, (disagreement and f"DISAGREES: {disagreement}", yanked)))
    return result.claim(one) or "-", facts.counting(result.patch, one.codes).state, one.status.value, note


def _folded(rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for cells, group in itertools.groupby(rows, lambda row: row[1:]):
        versions = [row[0] for row in group]
        span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]} ({len(versions)})"
        yield span, *cells


def _searched(result: Survey) -> str:
    known = sum(one.known for _, one in result.known)
    others = "" if known == len(result.known) else "; each process searches the code of the others"
    return f"rlhf_patches ships the search results for {known} of {len(result.known)} releases{others}"


def _verdict(result: Survey, versions: str, ranges: list[str], of_some: bool) -> str:
    claim = f"the range {versions or 'of every version'}"
    if not ranges:
        return f"{claim}: none of these releases has its code"
    if len(ranges) > 1:
        return (
            f"{claim}: its code is in {' and in '.join(ranges)}, but not in the releases between; "
            "a Variant can have one of these ranges"
        )
    if SpecifierSet(ranges[0]) == SpecifierSet(versions):
        return f"{claim}: as suggested"
    if not result.disagreements and of_some:  # the user has set the bounds
        return f"{claim}: holds for these releases"
    holds = "" if result.disagreements else " holds for these releases"
    open_ = ", but is open at one end" if facts.is_open(versions) else ""
    return f"{claim}{holds}{open_}; suggested: {ranges[0]}"
