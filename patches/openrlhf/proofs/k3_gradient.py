"""OpenRLHF's k3 estimate of the KL, where the exponential overflows."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

BOUND = 10.0
OVERFLOW = Case(
    "openrlhf",
    "openrlhf-k3-gradient",
    "k3, a difference of 95",
    "the gradient of the k3 estimate, with log-probabilities that differ by up to 30000",
)


def rows(reports: Reports) -> Iterator[Row]:
    """The gradient of each token, compared with Shao et al., arXiv:2402.03300, equation 4, in float64."""
    (report,) = reports
    differences, tokens = report["after"]["differences"], len(report["after"]["differences"]) - 1
    lost = {state: report[state]["k3"]["gradient"].count("nan") for state in ("before", "after")}
    off = math.inf
    if not lost["after"]:
        slopes = [0.0 if _bounded(each) else (1 - math.exp(-each)) / tokens for each in differences[:-1]] + [0.0]
        off = max(abs(found - slope) for found, slope in zip(report["after"]["k3"]["gradient"], slopes, strict=True))
    without, with_it = (f"nan for {count} of {tokens + 1}" if count else "none is nan" for count in lost.values())
    repaired = lost["before"] > 0 and off < 1e-6  # float32, numbers up to 1
    words = (without, with_it, f"the formula in float64: {off:.0e}")
    yield Row(OVERFLOW, report["version"], without, with_it, f"float64 {off:.0e}", repaired, words)


def _bounded(difference: float) -> bool:
    return math.exp(min(-difference, 700.0)) - 1 + difference > BOUND


PROOF = Proof((OVERFLOW,), rows)
