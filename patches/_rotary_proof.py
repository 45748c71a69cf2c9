"""For proofs: the row of a worker that compares with exact rotary frequencies (_rotary_model.py)."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Reports, Row


def rows(case: Case, name: str, reports: Reports) -> Iterator[Row]:
    """Compare log-probabilities with exact frequencies and float64.

    Args:
        case: the proof's.
        name: the worker's case.
        reports: of one rank.
    """
    (report,) = reports
    without, with_it = (report[state][name]["far"] for state in ("before", "after"))
    near = report["after"][name]["near"]
    # Of bfloat16, which is the same for tokens that are near.
    repaired = with_it < 2 * near < 0.5 * without
    yield Row(case, report["version"], f"{without:.3f}", f"{with_it:.3f}", f"{near:.3f} near", repaired)
