"""Log-probabilities of a long sequence in bf16."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "deepspeed",
    "deepspeed-rotary-precision",
    "bf16, 1,024 tokens",
    "bf16, ZeRO-1, a sequence of 1,024 tokens: mean error of the second half's log-probabilities",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare log-probabilities with exact frequencies and float64."""
    (report,) = reports
    without, with_it = (report[state]["bf16, ZeRO-1"]["far"] for state in ("before", "after"))
    near = report["after"]["bf16, ZeRO-1"]["near"]
    # Of bfloat16, which is the same for tokens that are near.
    repaired = with_it < 2 * near < 0.5 * without
    yield Row(CASE, report["version"], f"{without:.3f}", f"{with_it:.3f}", f"{near:.3f} near", repaired)


PROOF = Proof((CASE,), rows, ranks=1, seconds=15, arguments=("bf16, ZeRO-1",))
