"""GRPO's Liger loss where tools have answered."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-grpo-liger-tools",
    "GRPO, Liger and tools",
    "GRPOTrainer, use_liger_kernel and tools: the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, held against the formula in float64."""
    (report,) = reports
    case = max(report["before"], key=lambda name: report["before"][name]["error"])
    before, after = (report[state][case]["error"] for state in ("before", "after"))
    without, with_it = (f"off by {found:.2g}" for found in (before, after))
    # float32, one layer.
    yield Row(CASE, report["version"], without, with_it, "float64", before > 0.1 and after < 1e-5)


PROOF = Proof((CASE,), rows, seconds=20, needs=("liger_kernel",), settings=(("ACCELERATE_USE_CPU", "true"),))
