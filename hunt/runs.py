"""Runs of trainers on forks of fork servers, each once however many cells ask for it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hunt import frameworks, outcomes
from hunt.outcomes import Outcome
from hunt.trainers import Trainer
from hunt.worker import OFF
from tests.harness.forkserver import ForkServer

LIMIT = 480.0
"""Seconds after which ranks hang: two that compile need 60 of CPU, and CI shares two cores among nine sessions."""


@dataclass(frozen=True)
class Run:
    """A trainer, in a release (a folder of side-by-side, or None), with settings; patches off, on, or the one named.

    ``rehearsed``: held against itself, and not trained.
    """

    trainer: str
    release: str | None
    settings: Mapping[str, Any]
    patches: str = OFF
    rehearsed: bool = False

    @property
    def key(self) -> str:
        return json.dumps([self.trainer, self.release, sorted(self.settings.items()), self.patches, self.rehearsed])


@dataclass(frozen=True)
class Result:
    """What became of a run.

    Attributes:
        outcome: None where it failed.
        failed: how, in a line; None where it has not.
        cannot: why the release has no such trainer or setting; None where it has.
        applied: the patches that were applied.
        occurred: those that change results and whose bug occurred, on any rank.
        unknown: those that ran, and cannot tell.
        seconds: of CPU, of all ranks.
    """

    outcome: Outcome | None
    failed: str | None = None
    cannot: str | None = None
    applied: tuple[str, ...] = ()
    occurred: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    seconds: float = 0.0


class Runner:
    """Runs, some side by side; a run that has been asked for already is not run again."""

    def __init__(
        self, forkserver: ForkServer, folder: Path, trainers: Mapping[str, Trainer], side_by_side: int = 2
    ) -> None:
        self._forkserver, self._folder, self._trainers = forkserver, folder, trainers
        self._pool = ThreadPoolExecutor(side_by_side)
        self._lock = threading.Lock()
        self._asked: dict[str, Future[Result]] = {}
        self.helped: list[str] = []
        """Patches that have repaired a cell, in the order in which they did."""

    def ask(self, run: Run) -> Future[Result]:
        """Its result, when it is there."""
        with self._lock:
            if run.key not in self._asked:
                out = self._folder / str(len(self._asked))
                self._asked[run.key] = self._pool.submit(self._run, run, out)
            return self._asked[run.key]

    @property
    def results(self) -> list[Result]:
        """Of all runs that have ended."""
        return [asked.result() for asked in self._asked.values() if asked.done()]

    def close(self) -> None:
        """Start no other run."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, run: Run, out: Path) -> Result:
        out.mkdir(parents=True)
        ranks = run.settings.get("ranks", 1)
        request = {
            "trainer": run.trainer,
            "settings": run.settings,
            "patches": run.patches,
            "rehearsed": run.rehearsed,
        }
        how = None
        levels = frameworks.levels(self._trainers[run.trainer].framework, run.release)
        try:
            self._forkserver.run("hunt.worker", [json.dumps(request)], out, levels, ranks=ranks, timeout=LIMIT)
        except (RuntimeError, OSError) as error:  # OSError: a fork server has died
            if "not done after" in str(error):
                return Result(None, f"hangs: not done after {LIMIT:.0f} s")
            if not any((out / f"rank{rank}.json").exists() for rank in range(ranks)):
                return Result(None, f"ends: {str(error).strip().splitlines()[-1]}")
            how = re.search(r"rank \d+ died by \w+", str(error))
        reports = [json.loads(path.read_text()) for rank in range(ranks) if (path := out / f"rank{rank}.json").exists()]
        seconds = sum(report["seconds"] for report in reports)
        applied = tuple(reports[0]["applied"])
        if cannot := [report["cannot"] for report in reports if "cannot" in report]:
            return Result(None, cannot=cannot[0], seconds=seconds)
        if raised := [report["raised"] for report in reports if "raised" in report]:
            return Result(None, raised[0].strip().partition("\n")[0][:200], applied=applied, seconds=seconds)
        if how is not None:
            return Result(None, f"ends: {how[0]}", applied=applied, seconds=seconds)
        occurred, unknown = (
            tuple(sorted({patch for report in reports for patch in report.get(of, ())}))
            for of in ("occurred", "unknown")
        )
        return Result(outcomes.load(out), None, None, applied, occurred, unknown, seconds)
