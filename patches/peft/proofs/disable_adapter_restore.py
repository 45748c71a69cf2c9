"""Trainable parameters after disable_adapter."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

CASE = Case(
    "peft",
    "peft-disable-adapter-restore",
    "frozen parameters, one context",
    "requires_grad of frozen parameters, after disable_adapter",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The parameters that it has switched, and the clipped gradient compared with float64."""
    (report,) = reports
    before, after = (report[state]["clipping"] for state in ("before", "after"))
    changed = [
        sum(len(way) for make in report[state]["changed"].values() for way in make.values())
        for state in ("before", "after")
    ]
    without, patched = (f"norm {found['norm']:.4g}" for found in (before, after))
    off = abs(after["norm"] / after["wanted"] - 1)
    # float32, a model of a few layers.
    repaired = before["norm"] > 1.1 * before["wanted"] and off < 1e-5 and changed[0] > changed[1] == 0
    yield Row(CASE, report["version"], without, patched, f"float64 {off:.0e}", repaired)


PROOF = Proof((CASE,), rows)
