"""A resumed epoch if one rank draws for all."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-resume-dispatched",
    "dispatch_batches, 4 epochs",
    "samples of an epoch that was stopped and resumed, dispatch_batches",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The samples drawn after the resume, compared with an uninterrupted run."""
    (report,) = reports
    goes_on = []
    for state in ("before", "after"):
        found = report[state]["dispatched"]
        goes_on.append([one == other for one, other in zip(found["left"], found["resumed"], strict=True)])
    without, patched = (f"{sum(each)} of {len(each)} epochs right" for each in goes_on)
    right = all(goes_on[1])
    yield Row(
        CASE,
        report["transformers-resume-dispatched"][0],
        without,
        patched[:20],
        "uninterrupted",
        right and not all(goes_on[0]),
    )


PROOF = Proof((CASE,), rows, seconds=30, needs=("accelerate",))
