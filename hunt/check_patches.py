"""Relation 12: wherever a trainer was right, it is bit for bit what it was with every patch on.

That is losses, gradients, parameters, the optimizer's state and the saved files; and the objects that a user holds are
the same ones, of the same types, with the same attributes and hooks. A configuration is drawn from all that its trainer
takes. Where its numbers differ with the patches on, its plain counterpart (one process, one micro-batch) says which of
the two is right.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hunt import cells, outcomes, relations, sharded
from hunt.frameworks import ENVIRONMENTS
from hunt.outcomes import Outcome
from hunt.runs import Result, Run, Runner
from hunt.trainers import Trainer
from hunt.worker import OFF, ON

SAME, ACCEPTED, REPAIRED, CHANGED, BROKEN, CANNOT = "same", "accepted", "repaired", "changed", "BROKEN", "cannot"

GRID: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "compiled": (False, True),
    "checkpointing": (False, True),
    "lora": (False, True),
    "accumulation": (1, 4),
    "ranks": (1, 2),
    "packing": (False, True),
    "sharding": (None, *sharded.KINDS),
}
RESULTS = Path(__file__).with_name("results")
OF_THE_MODEL = ("dtype", "lora")
"""What a plain counterpart has too: the rest is to change nothing."""
NUMBERS = ("loss", "gradient", "values", "samples")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Between the sums of one micro-batch and of several; bfloat16 has a relative precision of 0.004 in each step."""
OF_EACH = 8
"""Configurations of a trainer, of up to 640 that there are."""
SAMPLES = 8


@dataclass(frozen=True)
class Configuration:
    """A trainer with settings; ``plain`` are those of its counterpart, in one process, one micro-batch, uncompiled."""

    trainer: Trainer
    settings: Mapping[str, Any]
    plain: Mapping[str, Any]

    @property
    def name(self) -> str:
        words = [
            name if value is True else f"{name}={value}"
            for name, value in self.settings.items()
            if name != "micro_batch" and (value is True or value not in (False, None, 1, "float32", "eager"))
        ]
        return f"{self.trainer.name} {' '.join(words) or 'plain'}"


def configurations(
    trainer: Trainer, number: int = OF_EACH, grid: Mapping[str, tuple[Any, ...]] = GRID
) -> Iterator[Configuration]:
    """The same ones every time, plain first; what a trainer must be given is what the pairs of relations give it."""
    names = [name for name in grid if name in trainer.takes]
    combined = [
        {**given, **dict(zip(names, values, strict=True))}
        for values in itertools.product(*(grid[name] for name in names))
        for given in _given(trainer, grid)
    ]
    drawn = random.Random(trainer.name).sample(combined[1:], min(number, len(combined)) - 1)
    for settings in [combined[0], *drawn]:
        if settings.get("sharding") and settings.get("ranks") != 2:
            settings["sharding"] = None
        plain: dict[str, Any] = {**settings, **{name: grid[name][0] for name in names if name not in OF_THE_MODEL}}
        for each in (settings, plain):
            if {"accumulation", "micro_batch"} <= trainer.takes:
                each["micro_batch"] = SAMPLES // (each["accumulation"] * each.get("ranks", 1))
        yield Configuration(trainer, settings, plain)


def _given(trainer: Trainer, grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Values of the settings that have no default, as far as the grid does not have them."""
    parameters = inspect.signature(trainer.run).parameters.values()
    needed = {each.name for each in parameters if each.kind == each.KEYWORD_ONLY and each.default is each.empty}
    needed -= {*trainer.fixed, *grid}
    pairs = (cell.pair for cell in cells.of(trainer, relations.every()) if needed <= cell.pair.needs)
    found = [{name: side[name] for name in needed if name in side} for pair in pairs for side in (pair.one, pair.other)]
    return [each for index, each in enumerate(found) if each not in found[:index] and each.keys() == needed]


@dataclass(frozen=True)
class Finding:
    """What became of a configuration: BROKEN where something that was right, or was held, is another now."""

    kind: str
    words: str = ""


@dataclass(frozen=True)
class Accepted:
    """An entry of reasons.toml: trainers of which the plain counterpart cannot say whether a patch is right.

    Attributes:
        trainers: globs of names.
        patch: its name.
        largest: the relative deviation up to which this is the reason.
    """

    trainers: Sequence[str]
    patch: str
    largest: float


def accepted() -> list[Accepted]:
    """Those of reasons.toml."""
    entries = cells.read(cells.REASONS).get("check-patches", [])
    return [Accepted(entry["trainers"], entry["patch"], float(entry["largest"])) for entry in entries]


def judge(configuration: Configuration, release: str | None, runner: Runner, known: Sequence[Accepted] = ()) -> Finding:
    """As released, and with every patch on; the run's own verdict has to say the same."""
    finding = _compared(configuration, release, runner, known)
    after = runner.ask(Run(configuration.trainer.name, release, dict(configuration.settings), ON)).result()
    of_the_trainer = configuration.settings.get("by") != "formula"  # whose outcome has none of the trainer's numbers
    if finding.kind == SAME and after.occurred and of_the_trainer:
        return Finding(BROKEN, f"the same, and its verdict says that {', '.join(after.occurred)} occurred")
    if finding.kind in (ACCEPTED, REPAIRED, CHANGED):
        if after.outcome is not None and not after.occurred and not after.unknown:
            return Finding(BROKEN, f"{finding.words}; its verdict says that no bug occurred")
        said = ", ".join(after.occurred) or f"unknown: {', '.join(after.unknown)}"
        return replace(finding, words=f"{finding.words}; verdict: {said}")
    return finding


def _compared(configuration: Configuration, release: str | None, runner: Runner, known: Sequence[Accepted]) -> Finding:
    name = configuration.trainer.name
    off, on = (runner.ask(Run(name, release, dict(configuration.settings), patches)) for patches in (OFF, ON))
    before, after = off.result(), on.result()
    if before.cannot or after.cannot:
        return Finding(CANNOT, before.cannot or after.cannot or "")
    if before.outcome is None or after.outcome is None:
        if before.failed == after.failed:
            return Finding(CANNOT, f"as released, and with patches: {before.failed}")
        if after.outcome is not None:
            return Finding(REPAIRED, f"as released: {before.failed}")
        return Finding(BROKEN, f"with patches: {after.failed}; as released: {before.failed or 'runs'}")
    if different := differences(before.outcome, after.outcome):
        for entry in known:
            if entry.patch in after.applied and any(fnmatch.fnmatchcase(name, glob) for glob in entry.trainers):
                found = outcomes.compare(before.outcome, after.outcome)
                if found.size <= entry.largest:
                    return Finding(ACCEPTED, f"{found} ({found.where}): {entry.patch}")
        return _judged(configuration, release, runner, before.outcome, after, different)
    return Finding(SAME)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Each part and name that is not the same in both, bit for bit."""
    found = []
    for part in sorted({**one, **other}):
        left, right = one.get(part, {}), other.get(part, {})
        found += [f"{part} {name}" for name in sorted({**left, **right}) if not _same(left.get(name), right.get(name))]
    return found


def _same(left: Any, right: Any) -> bool:
    if left is None or right is None or isinstance(left, str) or isinstance(right, str):
        return type(left) is type(right) and left == right
    return bool(left.shape == right.shape and np.array_equal(left, right, equal_nan=True))


def _judged(
    configuration: Configuration,
    release: str | None,
    runner: Runner,
    before: Outcome,
    patched: Result,
    different: list[str],
) -> Finding:
    """Numbers may be others where they were wrong; names and objects never."""
    after = patched.outcome or {}
    words = f"{len(different)} differ, {different[0]} first"
    for part in sorted({**before, **after}):
        left, right = before.get(part, {}), after.get(part, {})
        if left.keys() != right.keys():
            return Finding(BROKEN, f"{part}: {', '.join(sorted(left.keys() ^ right.keys()))} on one side only")
        for name, value in left.items():
            if part == "objects" and value != right[name]:
                return Finding(BROKEN, f"{part} {name}: {value}, with patches: {right[name]}")
    plain = Run(configuration.trainer.name, release, dict(configuration.plain), OFF)
    released = runner.ask(plain).result().outcome
    if released is None:
        return Finding(BROKEN, f"{words}; its plain counterpart does not run")
    tolerance = TOLERANCE[configuration.settings.get("dtype", "float32")]
    if not any(part in before and part in released for part in NUMBERS):
        was, now = outcomes.Deviation(0.0, None, ""), None
    else:
        was, now = (outcomes.compare(released, each, NUMBERS) for each in (before, after))
    if was.size > tolerance:
        if now is not None and now.size <= tolerance:
            return Finding(REPAIRED, f"{was} as released")
        return Finding(CHANGED, f"{words}; neither is what one process and one micro-batch give")
    # The plain one may have the bug itself.
    shown = _shown(configuration.trainer, patched.applied)
    if shown:
        on = runner.ask(replace(plain, patches=ON)).result().outcome
        if on is not None and (now is None or outcomes.compare(on, after, NUMBERS).size <= tolerance):
            return Finding(ACCEPTED, f"{words}, and so does its plain counterpart; right by {shown}")
    return Finding(BROKEN, f"{words}; it was what one process and one micro-batch give")


def _shown(trainer: Trainer, applied: Sequence[str]) -> str:
    """The cell of the trainer in the last hunt that holds with one of these patches, and not without."""
    for row in _rows():
        if row["trainer"] == trainer.name and row["kind"] == cells.KNOWN and row["why"] in applied:
            return f"{trainer.name}:{row['relation']}/{row['pair']}, {row['why']}"
    return ""


@functools.cache
def _rows() -> list[dict[str, Any]]:
    files = [RESULTS / f"{name}.json" for name in sorted(ENVIRONMENTS)]
    return [row for file in files if file.exists() for row in json.loads(file.read_text())["cells"]["rows"]]
