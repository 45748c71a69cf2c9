"""Learning rates that WarmupLR gives three parameter groups."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

RATES = Case(
    "deepspeed",
    "deepspeed-group-learning-rates",
    "WarmupLR, three parameter groups",
    "WarmupLR with three parameter groups: the learning rates after its warm-up, configured as 0.1, 0.004 and 0.03",
)
WANTED, WARMUP = (0.1, 0.004, 0.03), 4


def rows(reports: Reports) -> Iterator[Row]:
    """Compare the learning rates of each step with the formula of DeepSpeed's documentation in float64."""
    (report,) = reports
    before, after = (report[state]["linear"] for state in ("before", "after"))
    off = max(
        abs(found - rate * min(1.0, step / WARMUP)) / rate
        for step, rates in enumerate(after)
        for found, rate in zip(rates, WANTED, strict=True)
    )
    without, with_it = (" ".join(f"{rate:.3g}" for rate in found[-1]) for found in (before, after))
    # The same formula in another order of operations: a few units in the last place.
    repaired = off < 1e-12 and all(math.isclose(rate, WANTED[0]) for rate in before[-1])
    words = (without, with_it, f"the formula: {off:.0e}")
    yield Row(RATES, report["version"], without, with_it, f"formula {off:.0e}", repaired, words)


PROOF = Proof((RATES,), rows)
