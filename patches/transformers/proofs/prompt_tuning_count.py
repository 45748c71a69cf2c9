"""The number of tokens that divides a step's loss, behind virtual tokens."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-prompt-tuning-count",
    "prompt tuning, all tokens labeled",
    "PEFT's prompt tuning: gradient of a step, rows of 5 to 8 tokens that all have labels",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with the definition in float64."""
    (report,) = reports
    before, after = (report[state]["prompt tuning"] for state in ("before", "after"))
    without, patched = (f"{found['times']:.3f} x its size" for found in (before, after))
    off = max(abs(after["times"] - 1), after["beside"])
    # float32, one layer; 26 labels are predicted, 22 counted.
    repaired = abs(before["times"] - 26 / 22) < 1e-5 and off < 1e-5
    yield Row(CASE, report["version"], without, patched, f"float64 {off:.0e}", repaired)


PROOF = Proof((CASE,), rows, seconds=20, arguments=("prompt tuning",), needs=("accelerate", "peft"), gpu=True)
"""``peft`` puts the virtual tokens before the rows."""
