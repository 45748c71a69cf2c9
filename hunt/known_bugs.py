"""What the hunt can see: for each bug of the catalogue a cell that finds it in an older release, or why none can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hunt.cells import Cell, named, read
from hunt.relations import Relation
from hunt.trainers import Trainer

FILE = Path(__file__).with_name("known_bugs.toml")


@dataclass(frozen=True)
class Seen:
    """A bug, and the cell that finds it."""

    bug: str
    cell: Cell


def seen(trainers: Mapping[str, Trainer], relations: Mapping[str, Relation]) -> Iterator[Seen]:
    """Those of known_bugs.toml."""
    for bug, name in read(FILE)["seen"].items():
        yield Seen(bug, named(name, trainers, relations))


def unseen() -> dict[str, str]:
    """By bug, why no relation sees it; "the same" is what stands above it there."""
    found: dict[str, str] = {}
    for bug, why in read(FILE)["unseen"].items():
        found[bug] = found[next(reversed(found))] if why == "the same" else why
    return found
