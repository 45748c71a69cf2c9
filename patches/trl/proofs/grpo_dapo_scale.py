"""GRPO's default loss where a step is a part of a generation."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-grpo-dapo-scale",
    "GRPO, a step is 1/2 a generation",
    "GRPOTrainer, loss dapo, 4 steps_per_generation, 2 gradient_accumulation_steps: size of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, held against DAPO's formula in float64."""
    (report,) = reports
    before, after = (report[state]["4 and 2"] for state in ("before", "after"))
    without, with_it = (f"{found['factor']:.2f} x its size" for found in (before, after))
    verdict = f"float64 {after['error']:.0e}"
    words = (without, with_it, f"the formula in float64: {after['error']:.0e}")
    repaired = abs(before["factor"] - 0.5) < 1e-3 and after["error"] < 1e-5
    yield Row(CASE, report["version"], without, with_it, verdict, repaired, words)


PROOF = Proof((CASE,), rows, seconds=20)
