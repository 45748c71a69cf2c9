"""What does not count within a response, such as a tool's answer, is nobody's: without it there is the same."""

from hunt.relations import Pair

PAIRS = [
    Pair("left-out", {"answers": 3}, {"answers": 0}),
    Pair("longer", {"answers": 3}, {"answers": 5}),
    Pair("at-the-end", {"ending": 0}, {"ending": 2}),
]
