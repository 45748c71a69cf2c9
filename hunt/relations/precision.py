"""Layers that want lengths of their own, such as FP8's, get them, and what they compute is the same."""

from hunt.relations import Pair

PAIRS = [Pair("fp8", {"recipe": "none", "ranks": 2}, {"recipe": "delayed", "ranks": 2})]
