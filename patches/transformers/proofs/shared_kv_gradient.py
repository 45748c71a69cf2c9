"""Keys and values that later layers share."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "transformers",
    "transformers-shared-kv-gradient",
    "Gemma 4, reentrant checkpointing",
    "largest error of a parameter's gradient, two of four layers share keys and values",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with that without checkpointing in float64."""
    (report,) = reports
    before, after = (report[state]["Gemma4"]["gradient"] for state in ("before", "after"))
    # float32, four layers; without checkpointing it is off by 4e-5.
    yield off_by(CASE, report["version"], before, after, bug=0.1, tolerance=1e-4)


PROOF = Proof((CASE,), rows, arguments=("Gemma4",), seconds=15, gpu=True)
