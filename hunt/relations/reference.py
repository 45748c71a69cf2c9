"""The reference pass leaves modes, adapters and what is trainable as they were, and knows no dropout."""

from hunt.relations import Pair

PAIRS = [
    Pair("dropout", {"dropout": 0.0, "passes": "one"}, {"dropout": 0.1, "passes": "one"}, ("values",)),
    Pair("left", {"passes": "none"}, {"passes": "one"}, ("state",)),
    Pair("interrupted", {"passes": "none"}, {"passes": "interrupted"}, ("state",)),
]
