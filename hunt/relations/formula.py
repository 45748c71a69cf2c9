"""Where a paper's formula is short, the trainer's loss and gradient are those of the formula in float64."""

from hunt.relations import Pair

STEPS = {"micro_batch": 2, "accumulation": 4, "steps_per_generation": 1}

PAIRS = [
    Pair("float64", {"by": "formula"}, {"by": "trainer"}, tolerance=1e-4),
    # A step of several generations is the mean over them.
    Pair("generations", {"by": "formula", **STEPS}, {"by": "trainer", **STEPS}, tolerance=1e-4),
]
