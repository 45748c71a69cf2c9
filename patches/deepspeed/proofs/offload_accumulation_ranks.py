"""deepspeed-offload-accumulation, with and without the offload (steps.py)."""

from __future__ import annotations

import torch

from rlhf_patches.patches.deepspeed.proofs import steps

CASES = {
    "four": steps.Case(),
    "three": steps.Case(micro_batches=3),
    "two": steps.Case(micro_batches=2),
    "one": steps.Case(micro_batches=1),
    "clipped": steps.Case(clip=1.0),
    "by hand, two": steps.Case(micro_batches=2, by_hand=True),
    "by hand, four": steps.Case(by_hand=True),
    "by hand, one": steps.Case(micro_batches=1, by_hand=True),
    "bfloat16": steps.Case(dtype=torch.bfloat16),
    "not in the first": steps.Case(rare=(1, 2, 3)),
    "in the second of two": steps.Case(micro_batches=2, rare=(1,)),
    "ZeRO-1": steps.Case(stage=1),
    "ZeRO-1, by hand": steps.Case(stage=1, by_hand=True),
    "without offload": steps.Case(offload=False),
    "ZeRO-1 without offload": steps.Case(stage=1, offload=False),
    "bfloat16 masters": steps.Case(dtype=torch.bfloat16, masters=True),
}


def main() -> None:
    from deepspeed.runtime.zero import stage_1_and_2

    # DeepSpeed requires its own Adam for masters in bfloat16, which would have to be compiled.
    stage_1_and_2.DeepSpeedCPUAdam = torch.optim.SGD
    steps.report("deepspeed-offload-accumulation", CASES)
