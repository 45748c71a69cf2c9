"""A frozen adapter for the reference, loaded in addition to the policy's."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

FROZEN = Case(
    "peft",
    "peft-adapter-freeze",
    "gradient, a reference is loaded",
    "norm of the policy's gradient, a second, frozen adapter loaded",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient's norm, compared with float64."""
    (found,) = reports
    before, after = (found[state]["LoRA"] for state in ("before", "after"))
    wanted = f"float64 {after['wanted norm']:.5g}"
    repaired = before["norm"] == 0 and after["off float64 by"] < 1e-5
    without, with_it = (f"norm {one['norm']:.5g}" for one in (before, after))
    yield Row(FROZEN, found["version"], without, with_it, wanted, repaired, (without, with_it, wanted))


PROOF = Proof((FROZEN,), rows)
