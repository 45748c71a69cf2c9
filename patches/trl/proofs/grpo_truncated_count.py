"""GRPO's default loss if some completions are truncated, and masked."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .grpo_dapo_scale import sized

CASE = Case(
    "trl",
    "trl-grpo-truncated-count",
    "GRPO, some completions truncated",
    "GRPOTrainer, loss dapo, mask_truncated_completions, some completions truncated: size of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Some completions are truncated, and masked."""
    (report,) = reports
    before, after = (report[state]["masked"] for state in ("before", "after"))
    yield sized(CASE, report[CASE.patch][0], before, after, bug=lambda factor: factor < 0.8)


PROOF = Proof((CASE,), rows, seconds=20, arguments=("masked",), gpu=True)
