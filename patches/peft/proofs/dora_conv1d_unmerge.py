"""A DoRA adapter on a Conv1D that is merged into the base weights and unmerged."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row, off_by

CASE = Case(
    "peft",
    "peft-dora-conv1d-unmerge",
    "DoRA on a Conv1D, unmerged",
    "base weights of a Conv1D of 16 by 16 after a DoRA adapter was merged and unmerged",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The base weights, compared with those before."""
    (report,) = reports
    before, after = (report[state]["Conv1D"]["off"] for state in ("before", "after"))
    # float32 rounds each of four operations by 6e-8; small factors enlarge it.
    yield off_by(CASE, report["version"], before, after, bug=0.1, tolerance=1e-5, against="before merge")


PROOF = Proof((CASE,), rows)
