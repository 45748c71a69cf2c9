"""What several proofs read from the ranks' reports."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Reports, Row


def worst(reports: Reports, case: str) -> tuple[float, float]:
    """The worst error of `steps.outcome` on any rank, of norms or parameters, without and with the patch."""
    before, after = (
        max(max(report[state][case]["error"], report[state][case]["norm error"]) for report in reports)
        for state in ("before", "after")
    )
    return before, after


def of_stages(case: Case, reports: Reports) -> Iterator[Row]:
    """Compare the step of a pipeline with one stage per rank with the mean over micro-batches in float64."""
    before, after = ([report[state]["pipeline"] for report in reports] for state in ("before", "after"))
    without, with_it = (", ".join(f"{each['times']:.2f}" for each in found) for found in (before, after))
    off = max(each["error"] for each in after)
    # float32, a few layers.
    repaired = off < 1e-5 < 0.5 < max(each["error"] for each in before)
    yield Row(case, reports[0]["version"], without, with_it, f"float64 {off:.0e}", repaired)
