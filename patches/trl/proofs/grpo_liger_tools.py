"""GRPO with Liger's loss on completions of which some tokens are a tool's."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "trl",
    "trl-grpo-liger-tools",
    "GRPO, tools, Liger: the gradient",
    "GRPOTrainer, use_liger_kernel, 2 of 4 tokens of a tool: the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a batch, compared with GRPO's formula in float64 on the tokens that the model has written."""
    (report,) = reports
    before, after = (report[state]["tools"]["error"] for state in ("before", "after"))
    # Liger computes its softmax in float32.
    yield off_by(CASE, report["version"], before, after, bug=0.1, tolerance=1e-5)


PROOF = Proof(
    (CASE,), rows, seconds=15, arguments=("tools",), needs=("liger_kernel",), settings=(("TRITON_INTERPRET", "1"),)
)
