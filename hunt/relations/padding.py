"""Padding is nobody's token: more of it, or on the other side, changes nothing."""

from hunt.relations import Pair

PAIRS = [
    Pair("8-more", {"padding": 0}, {"padding": 8}),
    Pair("left", {"side": "right"}, {"side": "left"}),
]
