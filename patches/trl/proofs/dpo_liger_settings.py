"""DPO with Liger's loss, which the release does not give all of the user's settings."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

TITLES = {"robust": "DPO, Liger, loss_type robust", "discopop": "DPO, Liger, loss_type discopop"}
CASES = {
    case: Case("trl", "trl-dpo-liger-settings", title, f"{title.replace('DPO', 'DPOTrainer')}: the gradient")
    for case, title in TITLES.items()
}


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of a step, compared with each loss's formula in float64."""
    (report,) = reports
    for name, case in CASES.items():
        before, after = (report[state][name]["error"] for state in ("before", "after"))
        # Everything is in float64 but for one factor of Liger's, which leaves 3e-7.
        yield off_by(case, report[case.patch][0], before, after, bug=0.3, tolerance=1e-6)


PROOF = Proof(
    tuple(CASES.values()),
    rows,
    seconds=15,
    arguments=tuple(CASES),
    needs=("liger_kernel",),
    settings=(("TRITON_INTERPRET", "1"),),
)
