"""A reward is the same in whatever thread it is computed."""

from hunt.relations import Pair

PAIRS = [Pair("another", {"thread": "main"}, {"thread": "another"}, ("values",))]
