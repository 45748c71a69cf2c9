"""The saved keys of an adapter whose name is a prefix of another adapter's."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "peft",
    "peft-save-adapter-prefix",
    "two adapters, one is a prefix",
    "the saved keys of an adapter whose name is a prefix of another's",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The saved keys, compared with those of a model with this adapter alone."""
    (report,) = reports
    before, after = (report[state]["LoRA"] for state in ("before", "after"))
    more = [max(len(found["superfluous"]) for found in each.values()) for each in (before, after)]
    without, patched = (f"{number} keys too many" for number in more)
    repaired = more[0] > 0 == more[1]
    yield Row(CASE, report["version"], without, patched, "one adapter's" if repaired else "NO", repaired)


PROOF = Proof((CASE,), rows)
