"""The loss of an evaluation on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "transformers",
    "transformers-eval-loss",
    "evaluation on two ranks",
    "eval_loss of a causal model, on two ranks",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The loss, compared with the mean over tokens in float64."""
    (report, _) = reports
    before, after = (report[state]["causal"] for state in ("before", "after"))
    right = sum(after["wanted"]) / len(after["wanted"])
    without, patched = (f"{found['loss'] / right:.3f} x" for found in (before, after))
    off = abs(after["loss"] / right - 1)
    # float32, one layer.
    bug = abs(before["loss"] / right - 1)
    yield Row(CASE, report["version"], without, patched, f"float64 {off:.0e}", off < 1e-5 < 1e-4 < bug)


PROOF = Proof((CASE,), rows, ranks=2, seconds=20, arguments=("causal",), needs=("accelerate",), gpu=True)
