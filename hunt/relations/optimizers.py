"""An optimizer's steps are those of its definition, sharded or not, with whole batches or accumulated micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hunt.relations import Pair

OFFLOADED = {"optimizer": "muon", "accumulation": 1, "ranks": 2, "offload": True}


def _pairs(accumulation: int, ranks: int) -> Iterator[Pair]:
    whole = {"optimizer": "muon", "accumulation": accumulation, "ranks": ranks}
    how = "accumulating" if accumulation > 1 else "one-micro-batch"
    for stage in (0, 1, 2, 3):
        made: dict[str, Any] = {**whole, "stage": stage}
        # Up to 0.18.9 DeepSpeed orthogonalizes in bfloat16.
        yield Pair(f"zero{stage}-{how}", {**whole, "stage": None}, made, ("update",), tolerance=0.1)


PAIRS = [
    *_pairs(1, 2),
    *_pairs(3, 2),
    *(
        Pair(
            f"zero{stage}-offload",
            {**OFFLOADED, "stage": None},
            {**OFFLOADED, "stage": stage},
            ("update",),
            tolerance=0.1,
        )
        for stage in (1, 2, 3)
    ),
]
