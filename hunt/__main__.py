"""The command: ``make hunt``, ``make hunt NAMES="trl micro_batches"`` (docs/hunt.md)."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from hunt import cells, check_patches, frameworks, known_bugs, page, rehearse, relations, trainers
from hunt.cells import Cell, Verdict
from hunt.frameworks import ENVIRONMENTS, FRAMEWORKS
from hunt.runs import Runner
from hunt.trainers import Trainer
from tests.harness import failures, side_by_side
from tests.harness.forkserver import serving

ENVIRONMENT_FILES = Path(__file__).resolve().parents[1] / "tests" / "environments"
Item = TypeVar("Item")
Judged = TypeVar("Judged")


def main() -> int:
    """Status 1 if anything is new, was right and is another with the patches on, or is no longer found."""
    parser = argparse.ArgumentParser(prog="hunt", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="frameworks, trainers, relations, releases, cells")
    parser.add_argument("--environment", choices=ENVIRONMENTS, required=True, help="that of this interpreter")
    parser.add_argument(
        "--check-patches", type=float, metavar="SHARE", help="every patch on against off, over a share of 0 to 1"
    )
    parser.add_argument(
        "--known-bugs",
        type=float,
        metavar="SHARE",
        nargs="?",
        const=1.0,
        help="find the catalogue's bugs in older releases: all, or a share of 0 to 1",
    )
    parser.add_argument(
        "--rehearse",
        type=float,
        metavar="SHARE",
        nargs="?",
        const=1.0,
        help="rehearse the trainers on transformers.Trainer, all patches on: all configurations, or a share of 0 to 1",
    )
    parser.add_argument("--write", action="store_true", help="write what is found into docs/hunt.md")
    options = parser.parse_args()
    chosen = Chosen(options.environment, options.names, parser)
    if chosen.nothing:
        return 0
    part = options.known_bugs not in (None, 1.0) or options.rehearse not in (None, 1.0)
    part = part or (options.names and options.check_patches)
    if options.write and (chosen.release or part):
        parser.error("--write is for the newest releases, and for all of --check-patches, --known-bugs and --rehearse")
    if options.rehearse is not None:
        return rehearse_every(chosen, options.rehearse, options.write)
    if options.check_patches is not None:
        return check_every_patch(chosen, options.check_patches, options.write)
    if options.known_bugs is not None:
        return find_known(chosen, options.known_bugs, options.write)
    return hunt(chosen, options.write)


class Chosen:
    """What the names on the command line mean: each kind of them restricts the whole."""

    def __init__(self, environment: str, names: Sequence[str], parser: argparse.ArgumentParser) -> None:
        self.environment, self.whole = environment, not names
        every, self.relations = trainers.every(), relations.every()
        releases = {name for name in names if any(ENVIRONMENT_FILES.glob(f"side-by-side*/{name}.txt"))}
        try:
            self.cells = [cells.named(name, every, self.relations) for name in sorted({*names}) if ":" in name]
        except KeyError as error:
            parser.error(error.args[0])
        of_trainers, related = {*names} & {*every, *FRAMEWORKS}, {*names} & self.relations.keys()
        if unknown := {*names} - {cell.name for cell in self.cells} - of_trainers - related - releases:
            known = ", ".join([*FRAMEWORKS, *self.relations])
            parser.error(
                f"nothing has the name {', '.join(sorted(unknown))}; there are {known}, and releases, as trl-1.5"
            )
        if len(releases) > 1:
            parser.error(f"one release at a time, not {', '.join(sorted(releases))}")
        self.release = next(iter(releases), None)
        of_trainers |= {cell.trainer.name for cell in self.cells}
        self.trainers: dict[str, Trainer] = {
            name: each
            for name, each in every.items()
            if FRAMEWORKS[each.framework].environment == environment
            and (not of_trainers or of_trainers & {name, each.framework})
            and frameworks.concerns(each.framework, self.release)
        }
        if self.release is not None and not (side_by_side.ROOT / self.release).is_dir():
            self.trainers = {}
        self.nothing = bool(names) and not self.trainers
        """What was named is the other environment's."""
        if related:
            self.relations = {name: each for name, each in self.relations.items() if name in related}

    def release_of(self, trainer: Trainer) -> str | None:
        """The one that was named, or the newest."""
        return self.release or FRAMEWORKS[trainer.framework].newest

    def every(self) -> Iterator[Cell]:
        """The cells."""
        if self.cells:
            yield from (cell for cell in self.cells if cell.trainer.name in self.trainers)
            return
        for trainer in self.trainers.values():
            yield from cells.of(trainer, self.relations, self.release_of(trainer))


@contextlib.contextmanager
def running() -> Iterator[Runner]:
    """Fork servers, and the runs on them."""
    with tempfile.TemporaryDirectory(prefix="hunt-") as folder, serving() as forkserver:
        runner = Runner(forkserver, Path(folder), trainers.every())
        try:
            yield runner
        finally:
            runner.close()


def judged(items: Iterable[Item], judge: Callable[[Item], Judged]) -> Iterator[tuple[Item, Judged]]:
    """Each with its verdict, two at a time."""
    items = list(items)
    with ThreadPoolExecutor(2) as judges:
        yield from zip(items, judges.map(judge, items), strict=True)


def hunt(chosen: Chosen, write: bool) -> int:
    """Every relation on every trainer."""
    started, verdicts, known = time.monotonic(), [], cells.reasons()
    with running() as runner:
        for cell, verdict in judged(chosen.every(), lambda cell: cells.judge(cell, runner, known)):
            verdicts.append((cell, verdict))
            print(f"{verdict.kind:<9}{cell.name:<60} {verdict.words}", flush=True)
        spent = [result.seconds for result in runner.results]
    for cell, verdict in verdicts:
        if verdict.kind == cells.NEW:
            print(f'new: make hunt NAMES="{cell.name}"')
            failures.note(f"{cell.name}: {verdict.words}")
    words = summary(verdicts, spent, time.monotonic() - started)
    print(words)
    if write:
        page.write(chosen.environment, "cells", words, [page.of_cell(*each) for each in verdicts], chosen.whole)
    return int(not verdicts or any(verdict.kind == cells.NEW for _, verdict in verdicts))


def summary(verdicts: Sequence[tuple[Cell, Verdict]], spent: Sequence[float], took: float) -> str:
    """How many of each kind, and what it cost."""
    counts = Counter(verdict.kind for _, verdict in verdicts)
    kinds = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    each = f"{sum(spent) / max(1, len(verdicts)):.2f} per cell, {statistics.median(spent or [0]):.2f} per run (median)"
    cost = f"{len(spent)} runs in {took:.0f} s; {sum(spent):.0f} CPU s, {each}"
    return f"{len(verdicts)} cells: {kinds}; {cost}"


def check_every_patch(chosen: Chosen, share: float, write: bool) -> int:
    """Every patch on against off."""
    every = [each for trainer in chosen.trainers.values() for each in check_patches.configurations(trainer)]
    started, kinds = time.monotonic(), Counter[str]()
    known = check_patches.accepted()
    with running() as runner:
        some = every[:: round(1 / share)]
        for each, finding in judged(
            some, lambda each: check_patches.judge(each, chosen.release_of(each.trainer), runner, known)
        ):
            kinds[finding.kind] += 1
            if finding.kind != check_patches.SAME:
                print(f"{finding.kind:<9}{each.name:<60} {finding.words}", flush=True)
            if finding.kind == check_patches.BROKEN:
                failures.note(f"{each.name}: {finding.words}")
        spent = sum(result.seconds for result in runner.results)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    words = f"{sum(kinds.values())} configurations: {counts}; {time.monotonic() - started:.0f} s, {spent:.0f} CPU s"
    print(words)
    if write:
        page.write(chosen.environment, "check-patches", words)
    return int(bool(kinds[check_patches.BROKEN]) or not kinds[check_patches.SAME])


def rehearse_every(chosen: Chosen, share: float, write: bool) -> int:
    """Each trainer in drawn configurations, whose relations hold."""
    started, rows, known = time.monotonic(), [], rehearse.reasons()
    every = [each for trainer in chosen.trainers.values() for each in rehearse.configurations(trainer)]
    with running() as runner:
        some = every[:: round(1 / share)]
        for each, found in judged(
            some, lambda each: rehearse.judge(each, chosen.release_of(each.trainer), runner, known)
        ):
            rows.append((each, found))
            print(f"{found.kind:<12}{each.name:<60} {found.holds} hold; {found.words}", flush=True)
            if found.kind == cells.NEW:
                failures.note(f"{each.name}: {found.words}")
        spent = sum(result.seconds for result in runner.results)
    kinds = Counter(found.kind for _, found in rows)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    words = f"{len(rows)} configurations: {counts}; {time.monotonic() - started:.0f} s, {spent:.0f} CPU s"
    print(words)
    if write:
        page.write_rehearsed(rows, chosen.whole)
    return int(bool(kinds[cells.NEW]) or not kinds[cells.HOLDS])


def find_known(chosen: Chosen, share: float, write: bool) -> int:
    """The bugs of known_bugs.toml, each in a release that has it."""
    started, known, rows = time.monotonic(), cells.reasons(), []
    every = trainers.every()
    seen = [each for each in known_bugs.seen(every, relations.every()) if each.cell.trainer.name in chosen.trainers]
    with running() as runner:
        for each, verdict in judged(
            seen[:: round(1 / share)], lambda each: cells.judge(each.cell, runner, known, each.bug)
        ):
            found = verdict.kind == cells.KNOWN and each.bug in verdict.why
            rows.append((each, verdict, found))
            print(f"{'found' if found else 'MISSED':<7}{each.bug:<40} {each.cell.name}: {verdict.words}", flush=True)
            if not found:
                failures.note(f"MISSED {each.bug}, {each.cell.name}: {verdict.words}")
    words = f"{sum(found for *_, found in rows)} of {len(rows)} bugs found; {time.monotonic() - started:.0f} s"
    print(words)
    if write:
        kept = [[each.bug, each.cell.name, verdict.found] for each, verdict, found in rows if found]
        page.write(chosen.environment, "known-bugs", words, kept, chosen.whole)
    return int(not rows or not all(found for *_, found in rows))


if __name__ == "__main__":
    sys.exit(main())
