"""How a layer, a vocabulary or a sequence is divided among ranks changes nothing."""

from hunt.relations import Pair

PAIRS = [
    Pair("2", {"parallel": "tensor", "ranks": 1}, {"parallel": "tensor", "ranks": 2}),
    Pair(
        "with-sequences",
        {"parallel": "sequence", "ranks": 1, "micro_batch": 8},
        {"parallel": "sequence", "ranks": 2, "micro_batch": 8},
    ),
    Pair("sequence", {"sequence": False, "ranks": 2}, {"sequence": True, "ranks": 2}),
    Pair("mesh", {"mesh_tensor": 1}, {"mesh_tensor": 2}),
]
