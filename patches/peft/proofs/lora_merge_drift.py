"""An adapter that is merged into the base weights and unmerged, after each of 100 steps."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "peft",
    "peft-lora-merge-drift",
    "base weights, 100 merges, bf16",
    "base weights in bfloat16, 100 merges and unmerges of an adapter, as for weight synchronization",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The base weights, compared with their initial values, bit for bit."""
    (report,) = reports
    before, after = (report[state]["bfloat16"] for state in ("before", "after"))
    without, patched = (f"moved by {one['moved']:.2%}" for one in (before, after))
    verdict = "bit for bit" if after["same"] else "NO"
    words = (f"{without} of their mean size", f"{patched} of their mean size", verdict)
    repaired = before["moved"] > 0 and after["same"]
    yield Row(CASE, report["version"], without, patched, verdict, repaired, words)


PROOF = Proof((CASE,), rows, gpu=True)
