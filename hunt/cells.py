"""A cell is a pair of a relation on a trainer in a release; its verdict says what became of it."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from hunt import outcomes
from hunt.relations import Pair, Relation
from hunt.runs import Result, Run, Runner
from hunt.trainers import Trainer
from hunt.worker import OFF, ON

HOLDS, KNOWN, ACCEPTED, NEW, CANNOT = "holds", "known", "accepted", "NEW", "cannot"
REASONS = Path(__file__).with_name("reasons.toml")


@dataclass(frozen=True)
class Cell:
    """A pair of a relation on a trainer; ``release`` is a folder of side-by-side, or None for the newest."""

    trainer: Trainer
    relation: Relation
    pair: Pair
    release: str | None = None

    @property
    def name(self) -> str:
        """As it may stand in NAMES."""
        beside = f"@{self.release}" if self.release else ""
        return f"{self.trainer.name}{beside}:{self.relation.name}/{self.pair.name}"

    def runs(self, patches: str) -> tuple[Run, Run]:
        one, other = ({**settings} for settings in (self.pair.one, self.pair.other))
        return Run(self.trainer.name, self.release, one, patches), Run(self.trainer.name, self.release, other, patches)


@dataclass(frozen=True)
class Verdict:
    """What became of a cell, and why it is not new.

    Attributes:
        kind: HOLDS, KNOWN, ACCEPTED, NEW, or CANNOT: the release has no such trainer or setting.
        found: the deviation, or how one side failed.
        why: names of the patches that make it hold, or a reason from reasons.toml.
    """

    kind: str
    found: str
    why: str = ""

    @property
    def words(self) -> str:
        return f"{self.found}: {self.why}" if self.why else self.found


@dataclass(frozen=True)
class Reason:
    """An entry of reasons.toml: cells whose deviation is known without a patch, or accepted by definition.

    Attributes:
        kind: KNOWN or ACCEPTED.
        cells: globs of names.
        why: one line.
        largest: a larger deviation is new all the same; inf for sides that raise.
    """

    kind: str
    cells: Sequence[str]
    why: str
    largest: float


def read(file: Path) -> dict[str, Any]:
    """What stands in a TOML file."""
    return tomllib.loads(file.read_text())


def reasons() -> list[Reason]:
    """Those of reasons.toml."""
    by_kind = read(REASONS)
    return [
        Reason(kind, entry["cells"], " ".join(entry["why"].split()), float(entry["largest"]))
        for kind in (KNOWN, ACCEPTED)
        for entry in by_kind.get(kind, [])
    ]


def of(trainer: Trainer, relations: Mapping[str, Relation], release: str | None = None) -> Iterator[Cell]:
    """Every relation on a trainer that takes what it varies."""
    for relation in relations.values():
        for pair in relation.pairs:
            if pair.needs <= trainer.takes:
                yield Cell(trainer, relation, pair, release)


def named(name: str, trainers: Mapping[str, Trainer], relations: Mapping[str, Relation]) -> Cell:
    """The cell of that name, which may be in any release.

    Raises:
        KeyError: there is none.
    """
    own, _, release = name.partition(":")[0].partition("@")
    if (trainer := trainers.get(own)) is not None:
        for cell in of(trainer, relations, release or None):
            if cell.name == name:
                return cell
    raise KeyError(f"no cell {name}: expected TRAINER:RELATION/PAIR or TRAINER@RELEASE:RELATION/PAIR")


def judge(cell: Cell, runner: Runner, known: Sequence[Reason], bug: str | None = None) -> Verdict:
    """Run both sides as released; where they differ, with every patch; where that helps, with each.

    Args:
        cell: what to run.
        runner: runs it.
        known: the reasons that count.
        bug: the patch to try before the others.
    """
    found = compared(cell, runner, OFF)
    if found.kind != NEW:
        return found
    rest = compared(cell, runner, ON)
    reason = rest if rest.kind == HOLDS else _reason(cell, rest, known)
    if reason is None:
        return found if rest.found == found.found else Verdict(NEW, f"{found.found}; with patches {rest.found}")
    if rest.kind != HOLDS and rest.found == found.found:
        return reason
    names = helping(cell, rest, runner, bug)
    return Verdict(KNOWN, found.found, names + (f"; then {rest.found}, {reason.kind}: {reason.why}" * bool(reason.why)))


def helping(cell: Cell, rest: Verdict, runner: Runner, bug: str | None = None) -> str:
    """The patch that does alone what all of them do; those that have helped elsewhere are tried first."""
    results = [runner.ask(run).result() for run in cell.runs(ON)]
    names = {name for result in results for name in result.applied}
    for name in dict.fromkeys([*filter(None, [bug]), *runner.helped, *sorted(names)]):
        if name not in names:
            continue
        alone = compared(cell, runner, name)
        if alone == rest or alone.kind == rest.kind == HOLDS:  # rounding may differ
            runner.helped.append(name)
            return name
    return f"several of {', '.join(sorted(names))}"


def _reason(cell: Cell, found: Verdict, known: Sequence[Reason]) -> Verdict | None:
    for reason in known:
        if any(fnmatch.fnmatchcase(cell.name, glob) for glob in reason.cells) and _size(found) <= reason.largest:
            return Verdict(reason.kind, found.found, reason.why)
    return None


def compared(cell: Cell, runner: Runner, patches: str) -> Verdict:
    """Whether the two sides agree."""
    asked = [runner.ask(run) for run in cell.runs(patches)]
    one, other = (each.result() for each in asked)
    if one.cannot or other.cannot:
        return Verdict(CANNOT, one.cannot or other.cannot or "")
    if one.outcome is None or other.outcome is None:
        return Verdict(NEW, _failures(one, other))
    try:
        deviation = outcomes.compare(one.outcome, other.outcome, cell.pair.parts)
    except outcomes.Nothing as error:
        return Verdict(NEW, str(error))
    if deviation.size <= cell.pair.tolerance:  # NaN is not
        return Verdict(HOLDS, f"{deviation.size:.0e}")
    return Verdict(NEW, f"{deviation} ({deviation.where})" if deviation.ratio is None else str(deviation))


def _failures(one: Result, other: Result) -> str:
    if one.failed == other.failed:
        return f"both: {one.failed}"
    return "; ".join(f"{side}: {result.failed}" for side, result in (("one", one), ("other", other)) if result.failed)


def _size(verdict: Verdict) -> Any:
    """Of a deviation as it was printed; inf for all else."""
    first = verdict.found.split(" ")[0]
    try:
        return abs(float(first) - 1) if " x" in verdict.found[:12] else float(first)
    except ValueError:
        return float("inf")
