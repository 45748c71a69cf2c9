"""KTO with PEFT and Liger's loss, whose reference model the release leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "trl",
    "trl-kto-liger-reference",
    "KTO, PEFT, Liger: the gradient",
    "KTOTrainer, PEFT, use_liger_kernel: the adapter's gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a step, compared with KTO's equations in float64."""
    (report,) = reports
    before, after = (report[state]["PEFT"]["error"] for state in ("before", "after"))
    # Everything is in float64 but for one factor of Liger's, which leaves 1e-7.
    yield off_by(CASE, report["version"], before, after, bug=0.8, tolerance=1e-6)


PROOF = Proof(
    (CASE,),
    rows,
    seconds=15,
    arguments=("PEFT",),
    needs=("liger_kernel", "peft"),
    settings=(("TRITON_INTERPRET", "1"),),
)
