"""What the demo is made of: cases, and groups of cases that come from the same run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import cold
from tests.harness.cold import Reports
from tests.harness.warm import Levels, Warm


@dataclass(frozen=True)
class Case:
    """One line of a table. ``title`` has at most 33 characters; ``words`` is the longer one of docs/evidence.md."""

    framework: str
    patch: str
    title: str
    words: str = ""


@dataclass(frozen=True)
class Row:
    """What happened without the patch and with it, and what that was held against.

    Attributes:
        release: of the framework; "stand-in" for a function of ours (tests/harness/standins).
        without: at most 26 characters, as ``after`` 20 and ``verdict`` 13.
        words: the longer three of docs/evidence.md.
    """

    case: Case
    release: str
    without: str
    after: str
    verdict: str
    repaired: bool
    words: tuple[str, str, str]


@dataclass(frozen=True)
class Runner:
    """Runs workers of the tests, each in a folder of its own."""

    warm: Warm
    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def forked(self, worker: str, *arguments: str, levels: Levels, ranks: int = 2, **settings: str) -> Reports:
        """On forks of a process that has loaded the frameworks: seconds. Returns each rank's report."""
        return self.warm.run(worker, arguments, self._out(), levels, ranks=ranks, settings=settings)

    def launched(self, worker: str, *arguments: str, **settings: str) -> Reports:
        """On two ranks as a user starts them: torchrun, and fresh interpreters."""
        return cold.launch(worker, arguments, self._out(), settings=settings)

    def _out(self) -> Path:
        out = self.folder / str(next(self._numbers))
        out.mkdir()
        return out


@dataclass(frozen=True)
class Group:
    """Cases that come from the same runs, and the function that runs them and yields their rows in this order."""

    cases: tuple[Case, ...]
    rows: Callable[[Runner], Iterator[Row]]
