"""accelerate's FSDP2 on CPU ranks, where accelerate itself never chooses it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin


def prepare(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: str, efficient: bool
) -> Any:
    """``Accelerator``'s own preparation: the sharded model, and the optimizer with its parameters.

    Args:
        accelerator: whichever release's.
        model: whole, on each rank.
        optimizer: of its parameters.
        precision: ``mixed_precision``, ``bf16`` or ``no`` say.
        efficient: ``cpu_ram_efficient_loading``: rank 0 sends its parameters to the others.
    """
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=efficient)
    if precision != "no":
        plugin.set_mixed_precision(precision)
    accelerator.state._shared_state["_mixed_precision"] = precision
    accelerator.state._shared_state["fsdp_plugin"] = plugin
    return accelerator._prepare_fsdp2(model, optimizer)
