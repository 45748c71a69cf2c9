"""Packed and padding-free batches are the padded ones, without the padding."""

from hunt.relations import Pair

PAIRS = [
    Pair("packed", {"packing": False}, {"packing": True}),
    Pair("padding-free", {"padding_free": False}, {"padding_free": True}),
]
