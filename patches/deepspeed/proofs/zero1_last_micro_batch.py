"""Micro-batches of a step on ZeRO-1."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "deepspeed",
    "deepspeed-zero1-last-micro-batch",
    "ZeRO-1, 4 micro-batches",
    "ZeRO-1, 4 micro-batches a step: norms and parameters of three steps",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Norms and parameters of three steps, held against a loop in float64."""
    before, after = ([report[state]["four"] for report in reports] for state in ("before", "after"))
    worst = [max(max(found["error"], found["norm error"]) for found in each) for each in (before, after)]
    without, with_it = (f"off by {error:.2g}" for error in worst)
    # bfloat16 weights: 8 bits.
    repaired, unaffected = worst[0] > 0.25 > 2e-2 > worst[1], max(worst) < 2e-2
    yield Row(CASE, reports[0]["version"], without, with_it, "float64", repaired, unaffected=unaffected)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=("four",))
