"""A loop with accelerate that is resumed in its second epoch, by the worker of its test."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from cases import Case, Group, Row, Runner

from tests.harness.side_by_side import folder
from tests.harness.warm import TORCH, Level

RESUMED = Case(
    "accelerate",
    "accelerate-resume-order",
    "resumed in the second epoch",
    "skip_first_batches in the second epoch: the rest of its samples, of 24",
)


def order(runner: Runner) -> Iterator[Row]:
    """What is left of the epoch, held against a run without a stop."""
    levels = (*TORCH, Level("tests.harness.loading:accelerate", str(folder("accelerate-1.13"))))
    (report,) = runner.forked("tests.patches.accelerate.resume_order_ranks", "map", levels=levels, ranks=1)
    found = []
    for state in ("before", "after"):
        left, resumed = (list(chain(*report[state]["map"][name][1])) for name in ("left", "resumed"))
        again = len({*resumed} - {*left})
        found.append((f"{again} of {len(left)} seen twice", left == resumed))
    (without, wrong), (with_it, right) = found
    verdict = "same order" if right else "NO"
    yield Row(RESUMED, report["version"], without, with_it, verdict, right and not wrong, (without, with_it, verdict))


GROUPS = (Group((RESUMED,), order),)
