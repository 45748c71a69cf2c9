"""The remaining samples of a loop with accelerate that resumes in its second epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

RESUMED = Case(
    "accelerate",
    "accelerate-resume-order",
    "resumed in the second epoch",
    "skip_first_batches in the second epoch: the rest of its samples, of 24",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The remaining samples of the epoch, compared with an uninterrupted run."""
    (report,) = reports
    found = []
    for state in ("before", "after"):
        left, resumed = (list(chain(*report[state]["map"][name][1])) for name in ("left", "resumed"))
        again = len({*resumed} - {*left})
        found.append((f"{again} of {len(left)} seen twice", left == resumed))
    (without, wrong), (with_it, right) = found
    verdict = "same order" if right else "NO"
    yield Row(RESUMED, report["version"], without, with_it, verdict, right and not wrong, (without, with_it, verdict))


PROOF = Proof((RESUMED,), rows, arguments=("map",))
