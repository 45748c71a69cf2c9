"""The router's auxiliary loss under reentrant checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "transformers",
    "transformers-router-loss-reentrant",
    "Mixtral, reentrant checkpointing",
    "largest error of a parameter's gradient, two layers of four experts, auxiliary loss 0.5",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with that without checkpointing in float64."""
    (report,) = reports
    before, after = (report[state]["Mixtral"]["gradient"] for state in ("before", "after"))
    # float32, two layers; without checkpointing it is off by less than 1e-5.
    yield off_by(CASE, report["version"], before, after, bug=0.05, tolerance=1e-4)


PROOF = Proof((CASE,), rows, arguments=("Mixtral",), seconds=15, gpu=True)
