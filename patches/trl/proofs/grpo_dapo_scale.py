"""GRPO's default loss if a step is a part of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-grpo-dapo-scale",
    "GRPO, a step is 1/2 a generation",
    "GRPOTrainer, loss dapo, 4 steps_per_generation, 2 gradient_accumulation_steps: size of the gradient",
)


def sized(
    case: Case, release: str, before: dict[str, float], after: dict[str, float], *, bug: Callable[[float], bool]
) -> Row:
    """The factor on the gradient's size, compared with DAPO's formula in float64; ``bug``: whether the bug gives
    it.
    """
    without, with_it = (f"{found['factor']:.2f} x its size" for found in (before, after))
    verdict = f"float64 {after['error']:.0e}"
    words = (without, with_it, f"the formula in float64: {after['error']:.0e}")
    repaired = bug(before["factor"]) and after["error"] < 1e-5
    return Row(case, release, without, with_it, verdict, repaired, words)


def rows(reports: Reports) -> Iterator[Row]:
    """Four micro-batches per generation, two per step."""
    (report,) = reports
    before, after = (report[state]["4 and 2"] for state in ("before", "after"))
    yield sized(CASE, report["version"], before, after, bug=lambda factor: abs(factor - 0.5) < 1e-3)


PROOF = Proof((CASE,), rows, seconds=20, gpu=True)
