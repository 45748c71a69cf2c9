"""Seeds of the workers of a rollout server."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "ms-swift",
    "swift-rollout-worker-seed",
    "8 samples of a prompt, 2 workers",
    "samples of one prompt, two data-parallel workers of the rollout server",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The number of different samples of a prompt."""
    (report,) = reports
    before, after = (report[state]["2 workers"]["samples"][0] for state in ("before", "after"))
    different = [len({str(sample) for sample in found}) for found in (before, after)]
    without, patched = (f"{number} of {len(before)} differ" for number in different)
    repaired = different[0] < len(before) == different[1]
    yield Row(CASE, report["version"], without, patched, "all differ" if repaired else "NO", repaired)


PROOF = Proof((CASE,), rows, needs=("vllm",))
