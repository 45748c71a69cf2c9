"""Where a paper's formula is short, the trainer's loss and gradient are those of the formula in float64."""

from typing import Any

from hunt.relations import Pair

STEPS = {"micro_batch": 2, "accumulation": 4, "steps_per_generation": 1}


def by_both(name: str, **settings: Any) -> Pair:
    return Pair(name, {"by": "formula", **settings}, {"by": "trainer", **settings}, tolerance=1e-4)


PAIRS = [
    by_both("float64"),
    # A step of several generations is the mean over them.
    by_both("generations", **STEPS),
    # Old log-probabilities so far from the policy's that ratios are clipped on both sides; a tool's answer within a
    # response does not count.
    by_both("far", apart=1.0, answers=3),
]
