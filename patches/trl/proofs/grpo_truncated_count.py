"""GRPO's default loss where some completions are truncated, and masked."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-grpo-truncated-count",
    "GRPO, some completions truncated",
    "GRPOTrainer, loss dapo, mask_truncated_completions, some completions truncated: size of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, held against DAPO's formula in float64."""
    (report,) = reports
    before, after = (report[state]["masked"] for state in ("before", "after"))
    without, with_it = (f"{found['factor']:.2f} x its size" for found in (before, after))
    verdict = f"float64 {after['error']:.0e}"
    words = (without, with_it, f"the formula in float64: {after['error']:.0e}")
    repaired = before["factor"] < 0.8 and after["error"] < 1e-5
    yield Row(CASE, report[CASE.patch][0], without, with_it, verdict, repaired, words)


PROOF = Proof((CASE,), rows, seconds=20, arguments=("masked",), settings=(("ACCELERATE_USE_CPU", "true"),))
