"""Log-probabilities of a long sequence, of a reference model in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-rotary-precision",
    "bf16, 1,024 tokens",
    "a reference model in bf16, 1,024 tokens: mean error of the second half's log-probabilities",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare log-probabilities with exact frequencies and float64."""
    (report,) = reports
    without, with_it = (report[state]["reference"]["far"] for state in ("before", "after"))
    near = report["after"]["reference"]["near"]
    # Of bfloat16, which is the same for tokens that are near.
    repaired = with_it < 2 * near < 0.5 * without
    yield Row(CASE, report["version"], f"{without:.3f}", f"{with_it:.3f}", f"{near:.3f} near", repaired)


PROOF = Proof((CASE,), rows, ranks=1, seconds=20, arguments=("reference",))
