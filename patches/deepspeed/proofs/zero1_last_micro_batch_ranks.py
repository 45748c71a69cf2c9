"""deepspeed-zero1-last-micro-batch, with and without accumulation in float32 (steps.py)."""

from __future__ import annotations

import torch

from rlhf_patches.patches.deepspeed.proofs import steps

BF16 = {"stage": 1, "offload": False, "dtype": torch.bfloat16}
CASES = {
    "four": steps.Case(**BF16, accumulate="fp32"),
    "one": steps.Case(**BF16, accumulate="fp32", micro_batches=1),
    "clipped": steps.Case(**BF16, accumulate="fp32", clip=1.0),
    "by hand": steps.Case(**BF16, accumulate="fp32", by_hand=True, micro_batches=2),
    "bfloat16": steps.Case(**BF16),
    "float32": steps.Case(stage=1, offload=False),
    "ZeRO-2": steps.Case(stage=2, offload=False, dtype=torch.bfloat16, accumulate="fp32"),
}


def main() -> None:
    steps.report("deepspeed-zero1-last-micro-batch", CASES)
