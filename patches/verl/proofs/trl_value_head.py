"""The critic's value head, which TRL has moved."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-trl-value-head",
    "PPO's critic on today's TRL",
    "the values of PPO's critic, with TRL 0.29 or later",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Whether the critic can be created, and its values."""
    (report,) = reports
    before, after = (report[state]["critic"] for state in ("before", "after"))
    without = before.strip().splitlines()[-1][:26] if isinstance(before, str) else "values"
    repaired = isinstance(before, str) and not isinstance(after, str)
    values = f"{len(after['values'])} values" if repaired else "NO"
    yield Row(CASE, report["version"], without, values, "it is made" if repaired else "NO", repaired)


PROOF = Proof((CASE,), rows, needs=("trl",))
