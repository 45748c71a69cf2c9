"""The number of tokens that divides a step's loss."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-first-token-count",
    "GPT-2, labels on every token",
    "gradient of a step, rows of 5 to 8 tokens that all have labels",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with the definition in float64."""
    (report,) = reports
    before, after = (report[state]["GPT-2"] for state in ("before", "after"))
    without, patched = (f"{found['times']:.3f} x its size" for found in (before, after))
    off = max(abs(after["times"] - 1), after["beside"])
    # float32, one layer; 26 labels are counted, 22 predicted.
    repaired = abs(before["times"] - 22 / 26) < 1e-5 and off < 1e-5
    yield Row(CASE, report["version"], without, patched, f"float64 {off:.0e}", repaired)


PROOF = Proof((CASE,), rows, seconds=20, arguments=("GPT-2",), needs=("accelerate",), gpu=True)
