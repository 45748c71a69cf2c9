"""What a proof is: cases, a worker that runs them on each rank, and what the ranks' reports say of each.

A patch of the module ``PACKAGE.BUG`` has its proof in ``PACKAGE.proofs.BUG``, as ``PROOF``, and the proof's worker in
``PACKAGE.proofs.BUG_ranks``, whose function ``main`` runs on each rank. The worker imports the framework; the other
module must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Reports = list[dict[str, Any]]
"""Each rank's report, as `states.report` writes it."""


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Attributes:
        framework: as PyPI calls it.
        patch: the patch's name.
        title: at most 33 characters.
        words: a longer one, if there is more to say.
    """

    framework: str
    patch: str
    title: str
    words: str = ""


@dataclass(frozen=True)
class Row:
    """What happened without the patch and with it, and what that was held against.

    Attributes:
        case: which.
        release: of the framework.
        without: at most 26 characters, as ``after`` 20 and ``verdict`` 13: what it was held against.
        repaired: the bug has shown without the patch, and nothing of it with the patch.
        words: ``without``, ``after`` and ``verdict`` in more words, where there are more to say.
        unaffected: the bug does not show in this case on this release: right without the patch, and with it.
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
    """A row of two errors, without the patch and with it: the bug is above one bound, what is right below another.

    Args:
        case, release: of the row.
        before, after: the errors.
        bug: what the bug makes at least.
        tolerance: what is left to rounding, whose reason stands where it is given.
        against: what they were held against, the row's verdict.
    """
    without, patched = (f"off by {error:.2g}" for error in (before, after))
    repaired, unaffected = before > bug > tolerance > after, max(before, after) < tolerance
    return Row(case, release, without, patched, against, repaired, unaffected=unaffected)


@dataclass(frozen=True)
class Proof:
    """What is run, and what its ranks' reports say.

    Attributes:
        cases: the lines, in order.
        rows: from the ranks' reports, one row for each case.
        ranks: how many processes, which find each other by gloo where there are several.
        seconds: what it takes where the framework is on a local disk, about.
        arguments: of the worker.
        needs: top-level modules of which it needs one or more besides the patched one.
        settings: environment variables of each rank.
        worker: the module with the worker, beside this one, where it is another proof's too: ``OTHER_ranks``.
        gpu: whether the worker computes on a GPU where torch sees one. Ranks share it, by gloo.
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
