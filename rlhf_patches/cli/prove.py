"""``prove``: run each patch that applies here on the installed frameworks, without the patch and with it."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .. import settings
from ..definitions import registry
from ..definitions.listed import PATCH
from ..definitions.status import PatchReport, Status
from ..definitions.words import printable
from ..offline import evaluate
from ..proving import children, lookup
from ..proving.children import NotTried
from ..proving.lookup import LocatedProof
from ..proving.proof import Row
from . import output
from .command_line import INTERRUPTED, Commands, UsageError

_QUICK = 20
_MOST_AT_ONCE = 4
_HEADS = ("PATCH", "VERDICT", "RELEASE", "CASE", "WITHOUT", "WITH", "REFERENCE", "S")


class _Outcome(NamedTuple):
    """The outcome of one case of a patch; ``row`` is None if the case could not run, for ``reason``."""

    patch: str
    version: str | None
    row: Row | None
    seconds: float
    reason: str = ""
    gpu: bool = False

    @property
    def verdict(self) -> str:
        if self.row is None:
            return "not tried"
        if self.row.unaffected:
            return "unaffected"
        return "repaired" if self.row.repaired else "NOT repaired"

    def cells(self) -> tuple[str, ...]:
        row, version = self.row, printable(self.version or "-")
        if row is None:
            return (self.patch, self.verdict, version, "-", "-", "-", "-", f"{self.seconds:.0f}")
        measured = (row.without, row.after, row.verdict)
        return (self.patch, self.verdict, row.release, row.case.title, *measured, f"{self.seconds:.0f}")

    def as_json(self) -> dict[str, object]:
        row = self.row
        return {
            "patch": self.patch,
            "verdict": self.verdict,
            "release": row.release if row else self.version,
            "case": row.case.words or row.case.title if row else "",
            "without": row.words[0] if row else None,
            "with": row.words[1] if row else None,
            "held_against": row.words[2] if row else None,
            "seconds": round(self.seconds, 1),
            "reason": self.reason,
            "on": "gpu" if self.gpu else "cpu",
        }


def add(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add(
        "prove",
        _prove,
        "run each patch that applies here on the installed frameworks: as released, then repaired, against a reference",
        "rlhf-patches prove trl-grpo-dapo-scale",
    )
    command.add_argument("name", nargs="*", metavar="NAME", help="patches (default: all that apply here)")
    command.add_argument("--json", action="store_true", help="print JSON, see docs/cli.md")
    command.add_argument(
        "--seconds",
        type=float,
        default=children.SECONDS,
        metavar="N",
        help="wall-clock limit for each proof (%(default)g)",
    )
    command.add_argument(
        "--memory",
        type=float,
        default=children.MEMORY / 2**30,
        metavar="GIB",
        help="memory limit of a process (%(default)g)",
    )
    command.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help=f"proofs at a time (default: one for each core, at most {_MOST_AT_ONCE}; with --gpu one)",
    )
    command.add_argument(
        "--gpu", action="store_true", help="use the first GPU for proofs that support it; run the others on the CPU"
    )


def _prove(options: argparse.Namespace) -> int:
    if options.seconds <= 0 or options.memory <= 0:
        raise UsageError("--seconds and --memory are limits: expected numbers above 0")
    if options.jobs is not None and options.jobs < 1:
        raise UsageError("--jobs is a number of proofs: expected 1 or more")
    registered, failures = registry.load()
    by_name = {item.patch.name: item.patch for item in registered}
    for name in options.name:
        if name not in by_name:
            raise UsageError(
                f"there is no patch {name!r}{settings.nearest(name, list(by_name))}{registry.hint(failures)}"
            )
    on = _gpu() if options.gpu else ""
    chosen = [item for item in registered if item.patch.name in options.name or not options.name]
    report = evaluate.inspect(chosen)
    not_run: list[_Outcome] = []
    runs: list[tuple[PatchReport, LocatedProof]] = []
    without_proof = 0
    for row in report:
        why = "" if row.status is Status.APPLIES and row.kind == PATCH else _why_not(row)
        proof = None if why else lookup.proof_of(by_name[row.name])
        if proof is not None and not (missing := lookup.missing(proof.proof.needs)):
            runs.append((row, proof))
        elif proof is not None:
            why = f"it needs {', '.join(missing)}, which is not installed here"
        elif not why:
            without_proof += 1
            why = f"it has no proof: {lookup.why_none(by_name[row.name]) or 'no reason is given'}"
        if why and options.name:
            not_run.append(_Outcome(row.name, row.version, None, 0.0, why))
    runs.sort(key=lambda run: (run[1].proof.seconds > _QUICK, run[1].proof.seconds))
    memory = int(options.memory * 2**30)
    done: dict[str, list[_Outcome]] = {}
    interrupted = False
    try:
        for row, found in _run(runs, options, memory):
            done[row.name] = found
    except KeyboardInterrupt:
        interrupted = True
    outcomes = [*not_run, *(each for row, _ in runs for each in done.get(row.name, ()))]
    _print(outcomes, options, without_proof, on)
    if interrupted:
        output.complain(f"interrupted; not run: {', '.join(row.name for row, _ in runs if row.name not in done)}")
        return INTERRUPTED
    output.complain_of_plugins(failures)
    verdicts = {outcome.verdict for outcome in outcomes}
    return 1 if "NOT repaired" in verdicts else 2 if "not tried" in verdicts or not outcomes else 0


def _why_not(row: PatchReport) -> str:
    if row.kind != PATCH:
        return f"it is {'an' if row.kind[0] in 'aeiou' else 'a'} {row.kind}, which changes no code"
    return f"{row.status.value}: {row.why}"


def _gpu() -> str:
    try:
        return children.gpu_name()
    except NotTried as error:
        raise UsageError(f"--gpu: torch has no GPU here ({error}); without --gpu every proof runs on the CPU") from None


def _run(
    runs: Sequence[tuple[PatchReport, LocatedProof]], options: argparse.Namespace, memory: int
) -> Iterator[tuple[PatchReport, list[_Outcome]]]:
    """Run the proofs. Each one's line, and the time that the others will take, go to standard error as it ends."""
    begun, left, stop = time.monotonic(), sum(proof.proof.seconds for _, proof in runs), threading.Event()
    declared = left
    jobs = options.jobs or (1 if options.gpu else min(_cores(), _MOST_AT_ONCE))

    def outcomes(row: PatchReport, proof: LocatedProof) -> list[_Outcome]:
        gpu = options.gpu and proof.proof.gpu
        return [] if stop.is_set() else list(_outcomes(row, proof, options.seconds, memory, gpu, stop.is_set))

    with _bar(len(runs)) as (advance, write), concurrent.futures.ThreadPoolExecutor(jobs) as threads:
        running = {threads.submit(outcomes, *run): run for run in runs}
        try:
            for number, ended in enumerate(concurrent.futures.as_completed(running), 1):
                row, proof = running[ended]
                found = ended.result()
                yield row, found
                left -= proof.proof.seconds
                more = left * (time.monotonic() - begun) / (declared - left)
                verdicts = ", ".join(sorted({outcome.verdict for outcome in found})) or "no case"
                advance(row.name)
                if len(runs) > 1:
                    write(
                        f"{number} of {len(runs)}: {row.name}: {verdicts}{f'; about {more:.0f} s left' if left else ''}"
                    )
        finally:
            stop.set()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _outcomes(
    row: PatchReport, proof: LocatedProof, seconds: float, memory: int, gpu: bool, stopped: Callable[[], bool]
) -> Iterator[_Outcome]:
    """Run the proof of this patch: the outcome of each of its cases."""
    started = time.monotonic()
    try:
        reports = children.run(proof, seconds=seconds, memory=memory, gpu=gpu, stopped=stopped)
        rows = list(proof.proof.rows(reports))
    except NotTried as error:
        yield _Outcome(row.name, row.version, None, time.monotonic() - started, str(error), gpu)
        return
    took = time.monotonic() - started
    for each in rows:
        if each.case.patch == row.name:
            yield _Outcome(row.name, row.version, each, took, gpu=gpu)


def _print(outcomes: Sequence[_Outcome], options: argparse.Namespace, without_proof: int, on: str) -> None:
    if options.json:
        print(json.dumps([outcome.as_json() for outcome in outcomes], indent=2))
        return
    if outcomes:
        below = [[printable(outcome.reason)] if outcome.reason else [] for outcome in outcomes]
        output.print_table(_HEADS, [outcome.cells() for outcome in outcomes], below)
        print()
    counts = {
        name: sum(each.verdict == name for each in outcomes)
        for name in ("repaired", "unaffected", "NOT repaired", "not tried")
    }
    by_verdict = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    cases = f"{len(outcomes)} case{'s' * (len(outcomes) != 1)}"
    output.print_sentence(
        f"{cases}: {by_verdict}" if by_verdict else "no patch that applies here has a proof", style="bold"
    )
    if on:
        there = sorted({outcome.patch for outcome in outcomes if outcome.gpu})
        output.print_sentence(
            f"on {printable(on)}: {', '.join(there) or 'none'}{'; the others on the CPU' if there else ''}"
        )
    if without_proof and not options.name:
        output.print_sentence(f"{without_proof} patches that apply here have no proof; see their pages")


@contextlib.contextmanager
def _bar(count: int) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Functions for the name of a proof that ended and for a line about it; a progress bar on a terminal."""
    if not sys.stderr.isatty() or not count:
        yield lambda name: None, lambda line: print(line, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=count)

        def advance(name: str) -> None:
            progress.update(task, advance=1, description=name)

        yield advance, lambda line: progress.console.print(line, markup=False, highlight=False)
