"""Seeds of the replicas of a rollout server."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-replica-seed",
    "several replicas, one prompt",
    "samples of one prompt, from several replicas of the rollout server",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The seeds that replicas start with, and their samples."""
    (report,) = reports
    before, after = (report[state]["seeds"] for state in ("before", "after"))
    without, patched = (f"{len(set(found))} seeds for {len(found)}" for found in (before, after))
    drawn = [[str(each) for each in report[state]["alone"]] for state in ("before", "after")]
    different = [len(set(each)) for each in drawn]
    repaired = len(set(before)) == different[0] == 1 and len(set(after)) == different[1] == len(after) > 1
    yield Row(CASE, report["version"], without, patched, "all differ" if repaired else "NO", repaired)


PROOF = Proof((CASE,), rows, needs=("vllm",))
