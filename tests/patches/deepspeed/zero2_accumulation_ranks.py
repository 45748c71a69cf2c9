"""deepspeed-zero2-accumulation, with and without accumulation (steps.py)."""

from __future__ import annotations

import torch

from tests.patches.deepspeed import steps

CASES = {
    "four": steps.Case(offload=False),
    "two": steps.Case(offload=False, micro_batches=2),
    "clipped": steps.Case(offload=False, clip=1.0),
    "by hand": steps.Case(offload=False, by_hand=True),
    "not in the first": steps.Case(offload=False, rare=(1, 2, 3)),
    "bfloat16": steps.Case(offload=False, dtype=torch.bfloat16),
    "one": steps.Case(offload=False, micro_batches=1),
    "ZeRO-1": steps.Case(offload=False, stage=1),
}


def main() -> None:
    steps.report("deepspeed-zero2-accumulation", CASES)
