"""A loss leaves its inputs as they were."""

from hunt.relations import Pair

PAIRS = [Pair("unchanged", {"looked_at": "before"}, {"looked_at": "after"}, ("inputs",))]
