"""SFT of a small LLaVA on a conversation with an image."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "trl",
    "trl-vlm-image-labels",
    "SFT of LLaVA, one image",
    "SFTTrainer, LLaVA, a conversation with an image: error of the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, compared with that of the mean over text in float64."""
    (report,) = reports
    before, after = (report[state]["conversation"]["gradient"] for state in ("before", "after"))
    # Forward and backward in float32 of two small towers.
    yield off_by(CASE, report["version"], before, after, bug=0.1, tolerance=1e-4)


PROOF = Proof((CASE,), rows, needs=("PIL",), seconds=20, arguments=("conversation",))
