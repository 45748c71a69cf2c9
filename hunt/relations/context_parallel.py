"""How sequences are divided among ranks changes nothing."""

from hunt.relations import Pair

PAIRS = [
    Pair(
        "2",
        {"parallel": "context", "ranks": 1, "micro_batch": 8},
        {"parallel": "context", "ranks": 2, "micro_batch": 8},
    ),
]
