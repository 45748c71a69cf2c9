"""megatron-core's Gated DeltaNet where flash-linear-attention's Triton kernels cannot run.

With `deterministic_mode` it computes in torch throughout, but for one kernel: the L2 norm of queries and keys.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch


def l2norm(values: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """What flash-linear-attention's kernel computes, over the last dimension."""
    return values * torch.rsqrt(values.square().sum(-1, keepdim=True) + eps)


def install() -> ModuleType:
    """megatron-core's module, whose layers can be built and called."""
    from megatron.core.ssm import gated_delta_net

    for name in (gated_delta_net.__name__, f"{gated_delta_net.__name__}.common"):  # 0.19 has a package
        if name in sys.modules:
            vars(sys.modules[name]).update(HAVE_FLA=True, l2norm=l2norm)
    return gated_delta_net
