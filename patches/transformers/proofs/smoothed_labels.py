"""Smoothed labels of a causal model."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-smoothed-labels",
    "label smoothing, a causal model",
    "gradient of a step, label_smoothing_factor, a wrapped causal model",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with the definition in float64."""
    (report,) = reports
    case = max(report["before"], key=lambda name: report["before"][name].get("gradient off", 0))
    before, after = (report[state][case]["gradient off"] for state in ("before", "after"))
    without, patched = (f"off by {found:.2g}" for found in (before, after))
    # float32, one layer.
    yield Row(CASE, report["version"], without, patched, "float64", before > 0.5 and after < 1e-5)


PROOF = Proof((CASE,), rows, seconds=20, needs=("accelerate",), gpu=True)
