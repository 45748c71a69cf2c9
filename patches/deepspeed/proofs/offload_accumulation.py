"""Micro-batches of a step with an offloaded optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

from .rows import worst

CASE = Case(
    "deepspeed",
    "deepspeed-offload-accumulation",
    "ZeRO-2, offload, 4 micro-batches",
    "ZeRO-2 with an offloaded optimizer, 4 micro-batches a step: norms and parameters of three steps",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare norms and parameters of three steps with a loop in float64."""
    # float32, a few layers and steps.
    yield off_by(CASE, reports[0]["version"], *worst(reports, "four"), bug=0.1, tolerance=1e-5)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=("four",))
