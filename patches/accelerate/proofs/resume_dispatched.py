"""The remaining samples of a loop that resumes in an epoch, if one rank draws for both."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

NAME = "accelerate-resume-dispatched"
RESUMED = Case(
    "accelerate",
    NAME,
    "dispatch_batches, 2 ranks",
    "skip_first_batches with dispatch_batches on two ranks: the rest of each of four epochs",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The remaining samples of each epoch, compared with an uninterrupted run, on both ranks."""
    goes_on = []
    for state in ("before", "after"):
        found = [report[state]["dispatched"] for report in reports]
        epochs = [zip(each["left"], each["resumed"], strict=True) for each in found]
        goes_on.append([all(left == resumed for left, resumed in epoch) for epoch in zip(*epochs, strict=True)])
    without, patched = (f"{sum(each)} of {len(each)} epochs right" for each in goes_on)
    repaired = all(goes_on[1]) and not any(goes_on[0])
    yield Row(RESUMED, reports[0]["version"], without, patched, "uninterrupted", repaired)


PROOF = Proof((RESUMED,), rows, ranks=2, arguments=("--patch", NAME, "dispatched"), worker="resume_order_ranks")
