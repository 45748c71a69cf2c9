"""Online DPO's gradient with gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .grpo_dapo_scale import sized

CASE = Case(
    "trl",
    "trl-online-dpo-accumulation",
    "OnlineDPO, 4 micro-batches",
    "OnlineDPOTrainer, 4 gradient_accumulation_steps, given completions: size of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """A step of four micro-batches."""
    (report,) = reports
    before, after = (report[state]["OnlineDPO 4"] for state in ("before", "after"))
    yield sized(CASE, report["version"], before, after, bug=lambda factor: abs(factor - 4) < 1e-3)


PROOF = Proof((CASE,), rows, seconds=15, arguments=("OnlineDPO 4",))
