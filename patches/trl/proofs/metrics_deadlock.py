"""Metrics that only some ranks log."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "trl",
    "trl-metrics-deadlock",
    "a metric that one rank logs",
    "log_metric on one of two ranks: the ranks stall, or the metrics",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Whether ranks stall, and the mean of the logged values."""
    (report, _) = reports
    stalled = any(found["stalled"]["failed"] for found in reports)
    # Numbers that float32 represents exactly.
    right = all(
        found["metrics"] == {"one": (3 + 5) / 2} and found["columns"] == {"b": [None, None, "10", "11"]}
        for each in reports
        for found in each["after"]["on one rank"].values()
    )
    without = "stalls" if stalled else "does not stall"
    yield Row(CASE, report["version"], without, "continues", "exact means" if right else "NO", stalled and right)


PROOF = Proof((CASE,), rows, ranks=2, seconds=20)
