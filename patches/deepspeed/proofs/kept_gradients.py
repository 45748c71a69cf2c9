"""Steps in bf16 without ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "deepspeed", "deepspeed-kept-gradients", "bf16, no ZeRO, four steps", "bf16 without ZeRO: four steps of SGD"
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare the weights' way with the formula in float64."""
    (report,) = reports
    before, after = (report[state]["bf16, no scale"]["error"] for state in ("before", "after"))
    # Weights are rounded to bfloat16: seen 1e-2 of the way.
    yield off_by(CASE, report["version"], before, after, bug=0.5, tolerance=0.05)


PROOF = Proof((CASE,), rows, seconds=15, arguments=(CASE.patch, "bf16, no scale"), worker="half_precision_ranks")
