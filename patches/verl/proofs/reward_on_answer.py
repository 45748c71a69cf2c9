"""verl's estimators where the reward is on a tool's token."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-reward-on-answer",
    "GAE, ends with a tool's answer",
    "returns of GAE, rows that end with a tool's answer, which has the reward",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The returns, held against the definition in float64."""
    (report,) = reports
    before, after = (report[state]["gae, ends with an answer"]["returns"]["error"] for state in ("before", "after"))
    without, patched = (f"off by {found:.2g}" for found in (before, after))
    # float32: returns are of the order of 1.
    repaired, unaffected = before > 1e-2 > 1e-5 > after, max(before, after) < 1e-5
    yield Row(CASE, report["version"], without, patched, "float64", repaired, unaffected=unaffected)


PROOF = Proof((CASE,), rows)
