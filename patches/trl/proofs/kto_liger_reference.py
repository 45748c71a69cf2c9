"""KTO with Liger's loss and PEFT."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-kto-liger-reference",
    "KTO, Liger and PEFT",
    "KTOTrainer, use_liger_kernel and LoRA: size of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, held against the formula in float64."""
    (report,) = reports
    before, after = (report[state]["PEFT"] for state in ("before", "after"))
    without, with_it = (f"{found['factor']:.2f} x its size" for found in (before, after))
    verdict = f"float64 {after['error']:.0e}"
    words = (without, with_it, f"the formula in float64: {after['error']:.0e}")
    repaired = before["error"] > 0.5 and after["error"] < 1e-5
    yield Row(CASE, report["version"], without, with_it, verdict, repaired, words)


PROOF = Proof((CASE,), rows, seconds=20, needs=("liger_kernel", "peft"))
