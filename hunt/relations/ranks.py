"""What one rank computes from 8 samples, two ranks compute from 4 each; evaluation, too, where these do not divide."""

from hunt.relations import Pair

PAIRS = [
    Pair("2-ranks", {"micro_batch": 8, "ranks": 1}, {"micro_batch": 4, "ranks": 2}),
    Pair(
        "2-ranks-accumulating",
        {"micro_batch": 8, "accumulation": 1, "ranks": 1},
        {"micro_batch": 1, "accumulation": 4, "ranks": 2},
    ),
    Pair(
        "evaluation-of-5",
        {"evaluated": 5, "ranks": 1, "micro_batch": 1},
        {"evaluated": 5, "ranks": 2, "micro_batch": 1},
        ("metrics",),
    ),
]
