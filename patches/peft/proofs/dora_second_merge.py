"""Two DoRA adapters that are merged into a linear layer."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "peft",
    "peft-dora-second-merge",
    "two DoRA adapters, merged",
    "the weight of a linear layer into which two DoRA adapters are merged",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The merged weights, compared with DoRA's definition in float64."""
    (report,) = reports
    before, after = (report[state]["linear"]["off"] for state in ("before", "after"))
    # float32 rounds each of ten operations by 6e-8.
    yield off_by(CASE, report["version"], before, after, bug=0.01, tolerance=1e-5)


PROOF = Proof((CASE,), rows)
