"""GKD on completions that the student generates."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

from .grpo_dapo_scale import sized

CASE = Case(
    "trl",
    "trl-gkd-generated-count",
    "GKD, the student generates",
    "GKDTrainer, the student generates, 4 accumulated micro-batches: size of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """A step of four micro-batches, all of them generated."""
    (report,) = reports
    before, after = (report[state]["generated, accumulated"] for state in ("before", "after"))
    yield sized(CASE, report[CASE.patch][0], before, after, bug=lambda factor: factor < 0.8)


PROOF = Proof((CASE,), rows, seconds=15, arguments=("generated, accumulated",))
