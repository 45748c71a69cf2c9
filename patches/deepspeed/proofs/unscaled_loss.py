"""Steps in fp16 without ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case("deepspeed", "deepspeed-unscaled-loss", "fp16, no ZeRO, four steps", "fp16 without ZeRO: four steps of SGD")


def rows(reports: Reports) -> Iterator[Row]:
    """Compare the weights' way with the formula in float64."""
    (report,) = reports
    before, after = (report[state]["fp16"]["error"] for state in ("before", "after"))
    # Weights are rounded to float16: seen 1e-3 of the way.
    yield off_by(CASE, report["version"], before, after, bug=0.5, tolerance=0.02)


PROOF = Proof((CASE,), rows, seconds=15, arguments=(CASE.patch, "fp16"), worker="half_precision_ranks")
