"""SFT with label smoothing."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl", "trl-sft-label-smoothing", "SFT, label_smoothing_factor", "SFTTrainer, label_smoothing_factor 0.1: gradient"
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with the definition in float64."""
    (report,) = reports
    before, after = (report[state]["smoothed"] for state in ("before", "after"))
    error = after.get("gradient", 1.0)
    # float32, one layer.
    repaired = "num_valid_tokens" in before.get("failed", "") and error < 1e-5
    without = "AttributeError" if "failed" in before else f"off by {before['gradient']:.0e}"
    with_it = f"off by {error:.0e}"
    words = (f"AttributeError: {before['failed']}" if "failed" in before else without, with_it, "float64")
    yield Row(CASE, report["version"], without, with_it, "float64", repaired, words)


PROOF = Proof((CASE,), rows, seconds=15, arguments=("smoothed",))
