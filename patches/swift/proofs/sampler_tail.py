"""Samples at the end of a data set that the ranks do not divide."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "ms-swift",
    "swift-sampler-tail",
    "7 samples, 2 ranks",
    "7 samples in order, on two data-parallel ranks: those that no epoch draws",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare the samples that all ranks draw in an epoch with the data set."""
    seen = []
    for state in ("before", "after"):
        epochs = zip(*(report[state]["7, shuffled, kept"]["samples"] for report in reports), strict=True)
        seen.append([{sample for rank in ranks for sample in rank} for ranks in epochs])
    before, after = ([set(range(7)) - each for each in found] for found in seen)
    without, patched = (f"{max(map(len, found))} never drawn" for found in (before, after))
    whole = not any(after)
    yield Row(CASE, reports[0]["version"], without, patched, "each is drawn" if whole else "NO", whole and all(before))


PROOF = Proof((CASE,), rows, ranks=2)
