"""Before the first update a policy's ratio to the policy that has sampled is 1, for each token, dropout or not."""

from typing import Any

from hunt.relations import Pair

NONE: dict[str, Any] = {"epsilon": 1e-4, "dropout": 0.0}
DROPOUT = {**NONE, "dropout": 0.5}
AHEAD = {"accumulation": 2, "micro_batch": 4}

PAIRS = [
    Pair("dropout", NONE, DROPOUT, ("ratios of 1",)),
    Pair("dropout-accumulating", {**NONE, **AHEAD}, {**DROPOUT, **AHEAD}, ("ratios of 1",)),
    Pair("dropout-2-ranks", NONE, {**DROPOUT, "micro_batch": 4, "ranks": 2}, ("ratios of 1",)),
]
