"""Two implementations of one thing that a framework offers side by side compute the same."""

from hunt.relations import Pair

PAIRS = [Pair("vectorized", {"vectorized": False}, {"vectorized": True})]
