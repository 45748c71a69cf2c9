"""A weight update that fails in the rollout server."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "ms-swift",
    "swift-rollout-update-failed",
    "an update that fails",
    "the server's answer to the trainer after a weight update that a worker could not load",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The result of sampling after it."""
    (report,) = reports
    before, after = (report[state]["one worker"]["again"] for state in ("before", "after"))
    without, patched = ("goes on" if not isinstance(found, str) else "an error" for found in (before, after))
    repaired = not isinstance(before, str) and isinstance(after, str) and "the weights are not the policy's" in after
    yield Row(CASE, report["version"], without, patched, "reported" if repaired else "NO", repaired)


PROOF = Proof((CASE,), rows, needs=("vllm",))
