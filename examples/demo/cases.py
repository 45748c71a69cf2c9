"""What the demo is made of: cases, and groups of cases that come from the same run."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_patches.proving.lookup import worker_of
from rlhf_patches.proving.proof import Case, Proof, Row
from tests.harness import torchrun
from tests.harness.forkserver import ForkServer, Levels
from tests.harness.torchrun import Reports

__all__ = ["Case", "Group", "Row", "Runner", "proved"]


@dataclass(frozen=True)
class Runner:
    """Runs workers of the tests, each in a folder of its own."""

    forkserver: ForkServer
    folder: Path
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def forked(self, worker: str, *arguments: str, levels: Levels, ranks: int = 2, **settings: str) -> Reports:
        """On forks of a process that has loaded the frameworks: seconds. Returns each rank's report."""
        return self.forkserver.run(worker, arguments, self._out(), levels, ranks=ranks, settings=settings)

    def launched(self, worker: str, *arguments: str, **settings: str) -> Reports:
        """On two ranks as a user starts them: torchrun, and fresh interpreters."""
        return torchrun.launch(worker, arguments, self._out(), settings=settings)

    def _out(self) -> Path:
        out = self.folder / str(next(self._numbers))
        out.mkdir()
        return out


@dataclass(frozen=True)
class Group:
    """Cases that come from the same runs, and the function that runs them and yields their rows in this order."""

    cases: tuple[Case, ...]
    rows: Callable[[Runner], Iterator[Row]]


def proved(name: str, levels: Callable[[], Levels]) -> Group:
    """The cases of a patch's proof, on a release in which the bug shows.

    Args:
        name: the proof's module, relative to rlhf_patches.patches.
        levels: what is loaded for it.
    """
    package, _, bug = name.rpartition(".")
    module = f"rlhf_patches.patches.{package}.proofs.{bug}"
    proof: Proof = importlib.import_module(module).PROOF
    worker = worker_of(module, proof)

    def rows(runner: Runner) -> Iterator[Row]:
        settings = dict(proof.settings)
        reports = runner.forked(worker, *proof.arguments, levels=levels(), ranks=proof.ranks, **settings)
        return proof.rows(reports)

    return Group(proof.cases, rows)
