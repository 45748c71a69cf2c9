"""What deepspeed-offload-rare-parameters is about, and what it advises (steps.py)."""

from __future__ import annotations

import torch

from rlhf_patches.patches.deepspeed.proofs import steps

FIRST, LAST = (1, 2, 3), (0, 1, 2)
"""Micro-batches that use the whole model: not in the first one, not in the last one."""
CASES = {
    "not in the first": steps.Case(rare=FIRST),
    "not in the last": steps.Case(rare=LAST),
    "in the first of two": steps.Case(rare=(0,), micro_batches=2),
    "bfloat16": steps.Case(rare=LAST, dtype=torch.bfloat16),
    "in all": steps.Case(),
    "not in the second step": steps.Case(idle=(1,), micro_batches=1),
    "ZeRO-1, not in the second step": steps.Case(idle=(1,), micro_batches=1, stage=1),
    "ZeRO-1, only in the first step": steps.Case(idle=(1, 2), stage=1),
    "without offload, not in the second step": steps.Case(idle=(1,), micro_batches=1, offload=False),
    "every parameter in the loss, not in the second step": steps.Case(idle=(1,), touched=True),
    "ZeRO-1, every parameter in the loss, not in the second step": steps.Case(idle=(1,), touched=True, stage=1),
    "ZeRO-1, not in the first": steps.Case(rare=FIRST, stage=1),
    "ZeRO-1, not in the last": steps.Case(rare=LAST, stage=1),
    "without offload, not in the first": steps.Case(rare=FIRST, offload=False),
    "without offload, not in the last": steps.Case(rare=LAST, offload=False),
    "every parameter in the loss, not in the first": steps.Case(rare=FIRST, touched=True),
    "every parameter in the loss, not in the last": steps.Case(rare=LAST, touched=True),
}


def main() -> None:
    steps.report("deepspeed-offload-rare-parameters", CASES)
