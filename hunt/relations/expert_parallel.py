"""How experts are divided among ranks changes nothing."""

from hunt.relations import Pair

PAIRS = [
    Pair("2", {"experts": 1, "ranks": 2, "micro_batch": 4}, {"experts": 2, "ranks": 2, "micro_batch": 4}),
    Pair("2-of-1-rank", {"experts": 1, "ranks": 1, "micro_batch": 8}, {"experts": 2, "ranks": 2, "micro_batch": 4}),
    # Among ranks that share all other layers.
    Pair(
        "with-tensors",
        {"experts": 1, "ranks": 1, "parallel": "sequence"},
        {"experts": 2, "ranks": 2, "parallel": "sequence"},
    ),
]
