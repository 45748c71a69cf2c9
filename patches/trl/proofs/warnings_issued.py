"""GRPO's trainer beside transformers 5.1 and later."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-warnings-issued",
    "GRPO, transformers from 5.1 on",
    "GRPOTrainer, transformers from 5.1 on: the gradient of a step",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a batch, compared with GRPO's formula in float64."""
    (report,) = reports
    before, after = report["before"], report["after"]
    error = after.get("error", 1.0)
    # Both are in float64.
    repaired = "warnings_issued" in before.get("failed", "") and error < 1e-6
    with_it = f"off by {error:.0e}"
    without = "AttributeError" if "failed" in before else f"off by {before['error']:.0e}"
    words = (f"AttributeError: {before['failed']}" if "failed" in before else without, with_it, "float64")
    yield Row(CASE, report["version"], without, with_it, "float64", repaired, words)


PROOF = Proof((CASE,), rows, seconds=15)
