"""verl's GDPO on responses of several lengths."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "verl",
    "verl-gdpo-whitening",
    "GDPO, responses of many lengths",
    "advantages of GDPO, eight responses of 1 to 12 tokens",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The advantages, held against the definition in float64."""
    (report,) = reports
    before, after = (report[state]["lengths"]["error"] for state in ("before", "after"))
    without, patched = (f"off by {found:.2g}" for found in (before, after))
    # float32: advantages are of the order of 1.
    repaired, unaffected = before > 1e-2 > 1e-5 > after, max(before, after) < 1e-5
    yield Row(CASE, report["version"], without, patched, "float64", repaired, unaffected=unaffected)


PROOF = Proof((CASE,), rows)
