"""Rotary frequencies are those of float32, whatever the precision that a model trains in, and however it is sharded."""

from hunt import sharded
from hunt.relations import Pair

EXACT = {"frequencies": True, "bf16": False, "sharding": None, "ranks": 1}

PAIRS = [
    Pair(
        name or "whole",
        EXACT,
        {**EXACT, "bf16": True, "sharding": name, "ranks": 2 if name else 1},
        ("frequencies",),
        0.0,
    )
    for name in (None, *sharded.KINDS)
]
