"""verl's vectorized RLOO on groups of several sizes."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "verl",
    "verl-rloo-singletons",
    "RLOO, a group of one response",
    "advantages of rloo_vectorized, with one response alone in its group",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The advantages compared with the definition in float64."""
    (report,) = reports
    before, after = (report[state]["rloo_vectorized"]["one alone"]["error"] for state in ("before", "after"))
    # float32: advantages are of the order of 1.
    yield off_by(CASE, report["version"], before, after, bug=1e-2, tolerance=1e-5)


PROOF = Proof((CASE,), rows)
