"""Learning rates where a parameter group is empty."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "deepspeed",
    "deepspeed-empty-groups",
    "WarmupLR, a group is empty",
    "learning rates of three groups, one of them without trained parameters",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare the learning rates of each step with the formula."""
    (report,) = reports
    case = next(name for name, found in report["before"].items() if found["error"])
    before, after = (report[state][case] for state in ("before", "after"))
    right = after["error"] is None and after["rates"] == after["expected"]
    with_it = after["error"] or "rates of each"
    yield Row(CASE, report["version"], before["error"][:26], with_it, "the formula" if right else "NO", right)


PROOF = Proof((CASE,), rows, seconds=15)
