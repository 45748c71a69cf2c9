"""Online DPO's logged KL divergence of completions that differ in length."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "trl",
    "trl-online-dpo-metrics",
    "Online DPO, objective/kl",
    "OnlineDPOTrainer, objective/kl of completions of three to five tokens",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The relative error of the logged number."""
    (report,) = reports
    before, after = (report[state]["OnlineDPO 2"]["errors"]["objective/kl"] for state in ("before", "after"))
    # TRL logs what a sum of float32 numbers is; 1e-7 was seen.
    yield off_by(CASE, report["version"], before, after, bug=0.05, tolerance=1e-4)


PROOF = Proof((CASE,), rows, seconds=15, arguments=("OnlineDPO 2",))
