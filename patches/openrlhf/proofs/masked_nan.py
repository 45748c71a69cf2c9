"""Masked tokens with NaN or infinities."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "openrlhf",
    "openrlhf-masked-nan",
    "masked tokens hold NaN",
    "loss of a batch with NaN in masked tokens",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The loss and its gradient, compared bitwise with those for zeros in place of NaN."""
    (report,) = reports
    cases = {name.removesuffix(", nan") for name in report["before"] if name.endswith(", nan")}
    case = next(name for name in sorted(cases) if report["before"][f"{name}, nan"]["loss"] == "nan")
    before, after = (report[state][f"{case}, nan"] for state in ("before", "after"))
    zero = report["after"][f"{case}, zero"]
    without, patched = (f"loss {str(found['loss'])[:8]}" for found in (before, after))
    same = after["loss"] == zero["loss"] and after["gradient"] == zero["gradient"]
    yield Row(CASE, report["version"], without, patched, "that of zeros" if same else "NO", same)


PROOF = Proof((CASE,), rows)
