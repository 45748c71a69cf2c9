"""Steps of Muon under ZeRO-1."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "deepspeed",
    "deepspeed-muon-lost-momentum",
    "ZeRO-1, Muon, three steps",
    "Muon under ZeRO-1: the way of the weights in three steps",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare the parameters' way with Muon's definition in float64."""
    (report,) = reports
    before, after = (report[state]["stage 1"]["error"] for state in ("before", "after"))
    # Newton-Schulz runs in float16, or in float32 on a CPU without it: seen 4e-6 of the way.
    yield off_by(CASE, report["version"], before, after, bug=0.1, tolerance=0.02)


PROOF = Proof((CASE,), rows, seconds=15, arguments=("stage 1",))
