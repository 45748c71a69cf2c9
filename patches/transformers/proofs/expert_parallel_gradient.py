"""The routers' gradient of a mixture whose experts are on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "transformers",
    "transformers-expert-parallel-gradient",
    "Qwen3-MoE, experts on 2 ranks",
    "the routers' gradient of a tiny Qwen3-MoE whose experts are on two ranks",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with float64 in one process."""
    before, after = (max(report[state]["Qwen3-MoE"]["router"] for report in reports) for state in ("before", "after"))
    # float32, two layers.
    yield off_by(CASE, reports[0]["version"], before, after, bug=0.1, tolerance=1e-4)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15)
