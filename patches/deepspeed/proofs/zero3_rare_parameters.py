"""Parameters on ZeRO-3 that not every micro-batch uses."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

from .rows import worst

CASE = Case(
    "deepspeed",
    "deepspeed-zero3-rare-parameters",
    "ZeRO-3, parameters used at times",
    "ZeRO-3, parameters that some micro-batches do not use",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare norms and parameters of three steps with a loop in float64."""
    # float32, a few layers and steps.
    yield off_by(CASE, reports[0]["version"], *worst(reports, "not in the second step"), bug=0.1, tolerance=1e-5)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=("not in the second step",))
