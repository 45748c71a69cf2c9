"""GRPO that generates with transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "trl",
    "trl-continuous-batching-weights",
    "GRPO, bf16, continuous batching",
    "GRPOTrainer, bf16, continuous batching, learning rate 1e-6: error of two steps' updates",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The way of the weights in two steps, compared with Adam's in float64 on the same gradients."""
    (report,) = reports
    before, after = (report[state]["GRPO"]["error"] for state in ("before", "after"))
    # Weights of norms are 1: of an update of 1e-6 float32 rounds up to 6e-8 away.
    yield off_by(CASE, report["version"], before, after, bug=0.9, tolerance=0.05)


PROOF = Proof((CASE,), rows, seconds=20, arguments=("GRPO",), needs=("transformers>=5.8",))
