"""Steps of Muon under ZeRO-1 on two ranks, which share a matrix."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "deepspeed",
    "deepspeed-muon-split-matrices",
    "ZeRO-1, Muon, two ranks",
    "Muon under ZeRO-1 on two ranks, which share a matrix: the way of the weights in three steps",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare the parameters' way with Muon's definition in float64."""
    before, after = (max(report[state]["stage 1"]["error"] for report in reports) for state in ("before", "after"))
    # Newton-Schulz runs in bfloat16 until 0.18.9, and in float16 or float32 since: seen up to 7e-2 of the way.
    yield off_by(CASE, reports[0]["version"], before, after, bug=0.2, tolerance=0.12)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=("stage 1",))
