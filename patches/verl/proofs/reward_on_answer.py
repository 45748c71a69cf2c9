"""verl's estimators where the reward is on a tool's token."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "verl",
    "verl-reward-on-answer",
    "GAE, ends with a tool's answer",
    "returns of GAE, rows that end with a tool's answer with the reward",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The returns compared with the definition in float64."""
    (report,) = reports
    before, after = (report[state]["gae, ends with an answer"]["returns"]["error"] for state in ("before", "after"))
    # float32: returns are of the order of 1.
    yield off_by(CASE, report["version"], before, after, bug=1e-2, tolerance=1e-5)


PROOF = Proof((CASE,), rows)
