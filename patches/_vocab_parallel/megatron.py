"""`upstream.entropy_forward` over Megatron's tensor-parallel group, which functions of SkyRL and verl look up."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from . import upstream


@torch.compiler.disable
def entropy_forward(ctx: Any, vocab_parallel_logits: torch.Tensor) -> torch.Tensor:
    """``_VocabParallelEntropy.forward``, which verl and SkyRL share."""
    return upstream.entropy_forward(ctx, vocab_parallel_logits, parallel_state.get_tensor_model_parallel_group())
