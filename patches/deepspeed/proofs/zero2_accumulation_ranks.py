"""deepspeed-zero2-accumulation, with and without accumulation (steps.py)."""

from __future__ import annotations

import torch

from rlhf_patches.patches.deepspeed.proofs import steps

CASES = {
    "four": steps.Case(offload=False),
    "two": steps.Case(offload=False, micro_batches=2),
    "clipped": steps.Case(offload=False, clip=1.0),
    "by hand": steps.Case(offload=False, by_hand=True),
    "not in the first": steps.Case(offload=False, rare=(1, 2, 3)),
    "bfloat16": steps.Case(offload=False, dtype=torch.bfloat16),
    "one": steps.Case(offload=False, micro_batches=1),
    "ZeRO-1": steps.Case(offload=False, stage=1),
    "not contiguous": steps.Case(offload=False, contiguous=False),
    "not contiguous, one": steps.Case(offload=False, micro_batches=1, contiguous=False),
    "not contiguous, ZeRO-1": steps.Case(offload=False, stage=1, contiguous=False),
}


def by_dtype(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The result of `split_half_float_double` for tensors on a GPU.

    Before 0.19.8 it searches for "torch.cpu.FloatTensor", by analogy with "torch.cuda.FloatTensor". On CPUs the type is
    "torch.FloatTensor", so with `contiguous_gradients: false` CPU ranks reduce nothing at all.
    """
    kinds = (torch.half, torch.float, torch.double, torch.bfloat16)
    found = [[tensor for tensor in tensors if tensor.dtype == kind] for kind in kinds]
    return [same for same in found if same]


def main() -> None:
    from deepspeed.runtime.zero import stage_1_and_2

    stage_1_and_2.split_half_float_double = by_dtype
    steps.report("deepspeed-zero2-accumulation", CASES)
