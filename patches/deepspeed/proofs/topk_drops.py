"""Tokens that an expert takes."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "deepspeed",
    "deepspeed-topk-drops",
    "8 experts, k 4, negative logits",
    "MoE layer, 8 experts, k 4, negative router logits: choices of 59 tokens that are taken, and the output",
)


def rows(reports: Reports) -> Iterator[Row]:
    """Compare the kept choices with the free capacity, and the output with float64."""
    (report,) = reports
    before, after = (report[state]["negative"] for state in ("before", "after"))
    room, off = after["to keep"], f"{after['off']:.0e}"
    repaired = before["kept"] < after["kept"] == room and after["off"] < 1e-5
    words = (
        f"{before['kept']} of {room} for which there is room; the output is off by {before['off']:.0%}",
        f"{after['kept']}",
        f"in float64 off by {off}",
    )
    yield Row(
        CASE,
        report["version"],
        f"{before['kept']} of {room} taken",
        f"{after['kept']}",
        f"float64 {off}",
        repaired,
        words,
    )


PROOF = Proof((CASE,), rows, seconds=15)
