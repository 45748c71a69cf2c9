"""How layers are divided into stages changes nothing, nor whether a rank has one stage or several."""

from hunt.relations import Pair

BATCHES = {"micro_batch": 2, "accumulation": 4}

PAIRS = [
    Pair(name, {"pipeline": kind, "ranks": 1, **BATCHES}, {"pipeline": kind, "ranks": 2, **BATCHES})
    for name, kind in (("2", "stages"), ("interleaved", "interleaved"))
]
