"""An optimizer step over 8 samples is the same in one micro-batch as in several, whatever their sizes and lengths."""

from hunt.relations import STEP, Pair

WHOLE = {"micro_batch": 8, "accumulation": 1}

PAIRS = [
    Pair("8-of-1", WHOLE, {"micro_batch": 1, "accumulation": 8}),
    Pair("4-of-2", WHOLE, {"micro_batch": 2, "accumulation": 4}),
    Pair("3-3-2", WHOLE, {"micro_batch": 3, "accumulation": 3}),
    # The window of the second step has three samples only.
    Pair(
        "short-last-window",
        {**WHOLE, "rows": 11, "steps": 2},
        {"micro_batch": 1, "accumulation": 8, "rows": 11, "steps": 2},
        STEP,
    ),
]
