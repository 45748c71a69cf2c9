"""A micro-batch of pure padding in distillation."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-padding-only-micro-batch",
    "a micro-batch without a response",
    "distillation loss of a step with one micro-batch of pure padding",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The loss compared with the definition in float64."""
    (report,) = reports
    cases = report["before"]
    case = next((name for name, found in cases.items() if "failed" in found), next(iter(cases)))
    before, after = (report[state][case] for state in ("before", "after"))
    off = abs(after["found"]["loss"] - after["exact"]["loss"]) if "found" in after else float("inf")
    failed = before.get("failed", "")
    without = failed.strip().splitlines()[-1][:26] if failed else "a loss"
    # float32: losses are of the order of 1.
    right = off < 1e-5
    yield Row(
        CASE,
        report["version"],
        without,
        f"off by {off:.0e}",
        "float64",
        bool(failed) and right,
        unaffected=right and not failed,
    )


PROOF = Proof((CASE,), rows)
