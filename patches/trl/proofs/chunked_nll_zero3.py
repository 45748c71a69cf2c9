"""SFT's loss in chunks, of a head that ZeRO-3 has partitioned."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-chunked-nll-zero3",
    "SFT, chunked_nll, ZeRO-3",
    "SFT's loss chunked_nll, a head that ZeRO-3 has partitioned on 2 ranks: its gradient",
)


def trained(case: Case, reports: Reports) -> Row:
    """Whether the release raised, and the gradients' error with the patch."""
    before, after = ([report[state] for report in reports] for state in ("before", "after"))
    raised = all(found["raised"] for found in before)
    error = max(found.get("error", 1.0) for found in after)
    without = "RuntimeError in backward" if raised else f"off by {max(found['error'] for found in before):.0e}"
    with_it = f"off by {error:.0e}"
    words = (f"RuntimeError: {before[0]['raised']}" if raised else without, with_it, "float64")
    # Sums of some hundred products in float32.
    return Row(case, reports[0]["version"], without, with_it, "float64", raised and error < 1e-5, words)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradients, compared with the definition in float64."""
    yield trained(CASE, reports)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=("nll",), needs=("deepspeed",))
