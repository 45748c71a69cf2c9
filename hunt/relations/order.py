"""The order of the samples of a step changes nothing, and no sample sees another one's tokens."""

from hunt.relations import Pair

PAIRS = [
    Pair("reversed", {"order": "given"}, {"order": "reversed"}),
    # Only the first sample has labels: the others' tokens are nothing to it.
    Pair("others", {"others": 1}, {"others": 2}),
    Pair("others-packed", {"others": 1, "packing": True}, {"others": 2, "packing": True}),
]
