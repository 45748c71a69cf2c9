"""What stands where nothing counts, in padding and under a mask, is never looked at: NaN there changes nothing."""

from hunt.relations import Pair

PAIRS = [
    Pair("nan", {"garbage": "zero"}, {"garbage": "nan"}),
    Pair("inf", {"garbage": "zero"}, {"garbage": "-inf"}),
    Pair("large", {"garbage": "zero"}, {"garbage": "large"}),
]
