"""Settings that DPO's Liger loss does not get."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-dpo-liger-settings",
    "DPO, Liger and label_smoothing",
    "DPOTrainer, use_liger_kernel, loss_type robust: the gradient",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient, held against the formula in float64."""
    (report,) = reports
    before, after = (report[state]["robust"]["error"] for state in ("before", "after"))
    without, with_it = (f"off by {found:.2g}" for found in (before, after))
    # float32, one layer.
    yield Row(CASE, report[CASE.patch][0], without, with_it, "float64", before > 0.1 and after < 1e-5)


PROOF = Proof((CASE,), rows, seconds=20, arguments=("robust",), needs=("liger_kernel",))
