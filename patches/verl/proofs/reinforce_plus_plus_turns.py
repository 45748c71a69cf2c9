"""verl's REINFORCE++ on responses of several turns."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "verl",
    "verl-reinforce-plus-plus-turns",
    "REINFORCE++, ends with an answer",
    "advantages of reinforce_plus_plus, rows that end with a tool's answer",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The advantages compared with the definition in float64."""
    (report,) = reports
    before, after = (report[state]["ends with an answer"]["advantages"]["error"] for state in ("before", "after"))
    # float32: advantages are of the order of 1.
    yield off_by(CASE, report["version"], before, after, bug=1e-2, tolerance=1e-5)


PROOF = Proof((CASE,), rows)
