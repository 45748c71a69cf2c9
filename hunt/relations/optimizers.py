"""An optimizer's steps are those of its definition, sharded or not, with whole batches or accumulated micro-batches."""

from __future__ import annotations

from typing import Any

from hunt.relations import Pair

MUON = {"optimizer": "muon", "ranks": 2}
HOW: dict[str, dict[str, Any]] = {
    "one-micro-batch": {"accumulation": 1},
    "accumulating": {"accumulation": 3},
    "offload": {"accumulation": 1, "offload": True},
}

PAIRS = [
    # Up to 0.18.9 DeepSpeed orthogonalizes in bfloat16.
    Pair(f"zero{stage}-{how}", {**MUON, **more, "stage": None}, {**MUON, **more, "stage": stage}, ("update",), 0.1)
    for how, more in HOW.items()
    for stage in (0, 1, 2, 3)
    if stage or how != "offload"
]
