"""Sampling parameters that an agent's samples share."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "openrlhf",
    "openrlhf-own-sampling",
    "an agent, 3 observations",
    "max_tokens of three samples whose observations have 20, 40 and 30 of 64 tokens",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The tokens that each sample requests, compared with the length that its observation leaves."""
    (report,) = reports
    before, after = (
        [turns[0]["max_tokens"] for turns in report[state]["lengths"]["asked"].values()]
        for state in ("before", "after")
    )
    without, patched = (" ".join(map(str, found)) for found in (before, after))
    repaired = after == [44, 24, 34] != before
    yield Row(CASE, report["version"], without, patched, "44 24 34", repaired)


PROOF = Proof((CASE,), rows)
