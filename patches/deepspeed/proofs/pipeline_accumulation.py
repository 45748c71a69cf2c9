"""Micro-batches of a step of DeepSpeed's engines."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "deepspeed",
    "deepspeed-pipeline-accumulation",
    "two stages, 4 micro-batches",
    "a pipeline of two stages, 4 micro-batches a step: how much of its gradient each stage trains on",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The step, held against the mean over micro-batches in float64."""
    before, after = ([report[state]["pipeline"] for report in reports] for state in ("before", "after"))
    without, with_it = (", ".join(f"{each['times']:.2f}" for each in found) for found in (before, after))
    off = max(each["error"] for each in after)
    # float32, a few layers.
    repaired = off < 1e-5 and max(each["error"] for each in before) > 0.1
    yield Row(CASE, reports[0]["version"], without, with_it, f"float64 {off:.0e}", repaired)


PROOF = Proof((CASE,), rows, ranks=2, seconds=15, arguments=(CASE.patch, "pipeline"), worker="accumulation_scale_ranks")
