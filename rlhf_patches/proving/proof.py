"""The definition of a proof: cases, a worker that runs them on each rank, and rows from the ranks' reports.

A patch of the module ``PACKAGE.BUG`` has its proof in ``PACKAGE.proofs.BUG``, as ``PROOF``, and the proof's worker in
``PACKAGE.proofs.BUG_ranks``, whose function ``main`` runs on each rank. The worker imports the framework; the proof's
module must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Reports = list[dict[str, Any]]
"""Each rank's report, written by `states.report`."""


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Attributes:
        framework: the name on PyPI.
        patch: the patch's name.
        title: the title, at most 33 characters.
        words: an optional longer title.
    """

    framework: str
    patch: str
    title: str
    words: str = ""


@dataclass(frozen=True)
class Row:
    """The results without the patch and with it, and the reference.

    Attributes:
        case: the case.
        release: the framework's release.
        without: the result without the patch, at most 26 characters; ``after``: with it, at most 20; ``verdict``: the
            reference, at most 13.
        repaired: whether the bug occurs without the patch, and does not occur with it.
        words: optional longer texts for ``without``, ``after`` and ``verdict``.
        unaffected: whether this case on this release is right both without the patch and with it.
    """

    case: Case
    release: str
    without: str
    after: str
    verdict: str
    repaired: bool
    words: tuple[str, str, str] = ("", "", "")
    unaffected: bool = False

    def __post_init__(self) -> None:
        if not any(self.words):
            object.__setattr__(self, "words", (self.without, self.after, self.verdict))


def off_by(
    case: Case, release: str, before: float, after: float, *, bug: float, tolerance: float, against: str = "float64"
) -> Row:
    """A row of two errors, without the patch and with it: a bug's error is above one bound, a right one below another.

    Args:
        case, release: as in the row.
        before, after: the errors.
        bug: the least error of the bug.
        tolerance: the bound for rounding; the caller documents its reason.
        against: the reference, the row's verdict.
    """
    without, patched = (f"off by {error:.2g}" for error in (before, after))
    repaired, unaffected = before > bug > tolerance > after, max(before, after) < tolerance
    return Row(case, release, without, patched, against, repaired, unaffected=unaffected)


@dataclass(frozen=True)
class Proof:
    """A proof: its worker's settings, and the evaluation of the ranks' reports.

    Attributes:
        cases: the lines, in order.
        rows: from the ranks' reports, one row for each case.
        ranks: the number of processes; several communicate by gloo.
        seconds: the approximate duration with the framework on a local disk.
        arguments: the arguments of the worker.
        needs: top-level modules that the proof needs in addition to the patched one: ``ray``, ``transformers>=5``.
        settings: environment variables of each rank.
        worker: the worker's module in the same package, if another proof shares it: ``OTHER_ranks``.
        gpu: whether the worker computes on a GPU if torch sees one. Ranks share it, by gloo.
    """

    cases: tuple[Case, ...]
    rows: Callable[[Reports], Iterator[Row]]
    ranks: int = 1
    seconds: int = 10
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    worker: str = ""
    gpu: bool = False
