"""The reference pass of ms-swift's GRPO trainer without Megatron, with LoRA and dropout."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "ms-swift",
    "swift-null-ref-context-hf",
    "GRPO, LoRA, dropout: reference",
    "rlhf_type grpo, LoRA, dropout 0.1: the reference's log-probabilities",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Log-probabilities of the reference pass, compared with float64, from the weights without the adapter."""
    (report,) = reports
    before, after = (report[state]["error"] for state in ("before", "after"))
    # float32 through a layer, which showed as 4e-7.
    yield off_by(CASE, report["version"], before, after, bug=0.01, tolerance=1e-5)


PROOF = Proof((CASE,), rows, seconds=15)
