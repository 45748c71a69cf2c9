"""Micro-batches of a step on ZeRO-1."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

from .rows import worst

CASE = Case(
    "deepspeed",
    "deepspeed-zero1-last-micro-batch",
    "ZeRO-1, 4 micro-batches",
    "ZeRO-1, 4 micro-batches a step: norms and parameters of three steps",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare norms and parameters of three steps with a loop in float64."""
    # bfloat16 weights: 8 bits.
    yield off_by(CASE, reports[0]["version"], *worst(reports, "four"), bug=0.25, tolerance=2e-2)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=("four",))
