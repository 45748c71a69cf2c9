"""verl's vectorised RLOO on groups of several sizes."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-rloo-singletons",
    "RLOO, a group of one response",
    "advantages of rloo_vectorized, one response has no others in its group",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The advantages, held against the definition in float64."""
    (report,) = reports
    before, after = (report[state]["rloo_vectorized"]["one alone"]["error"] for state in ("before", "after"))
    without, patched = (f"off by {found:.2g}" for found in (before, after))
    # float32: advantages are of the order of 1.
    repaired, unaffected = before > 1e-2 > 1e-5 > after, max(before, after) < 1e-5
    yield Row(CASE, report["version"], without, patched, "float64", repaired, unaffected=unaffected)


PROOF = Proof((CASE,), rows)
