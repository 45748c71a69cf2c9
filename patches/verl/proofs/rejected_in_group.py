"""verl's GRPO on a group of which rollout correction has rejected a response."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "verl",
    "verl-rejected-in-group",
    "GRPO, rollout_rs",
    "GRPO, rollout_rs=seq_sum_k1, 2 of 8 responses rejected: advantages of the others",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The advantages compared with those of the responses that are kept, in float64."""
    (report,) = reports
    before, after = (report[state]["grpo"]["error"] for state in ("before", "after"))
    # float32: advantages are of the order of 1. The reference has GRPO's epsilon, too.
    yield off_by(CASE, report["version"], before, after, bug=1e-2, tolerance=1e-5)


PROOF = Proof((CASE,), rows, arguments=("grpo",))
