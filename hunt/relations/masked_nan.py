"""What stands where nothing counts, in padding and under a mask, is never looked at: NaN there changes nothing."""

from hunt.relations import Pair

PAIRS = [
    Pair("nan", {"masked_values": "zero"}, {"masked_values": "nan"}),
    Pair("inf", {"masked_values": "zero"}, {"masked_values": "-inf"}),
    Pair("large", {"masked_values": "zero"}, {"masked_values": "large"}),
]
