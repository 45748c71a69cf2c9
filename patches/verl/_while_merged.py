"""The tensors of an engine whose LoRA stays merged until the last tensor has been taken."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def get_per_tensor_param(wrapped: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    """Around `FSDPEngine.get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **kwargs)`."""
    module = instance.module
    if not (instance.model_config.lora.get("merge", False) and hasattr(module, "peft_config")):
        return wrapped(*args, **kwargs)
    if not isinstance(module, FSDPModule):  # FSDP1's state_dict() makes copies
        return wrapped(*args, **kwargs)
    return _while_merged(lambda: wrapped(*args, **kwargs)[0], instance), None


def _while_merged(tensors_of_the_model: Callable[[], Any], engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    verls = importlib.import_module("verl.utils.fsdp_utils")
    module = engine.module
    if not getattr(engine, "_uses_fsdp2_cpu_offload_policy", False):  # since 0.8.0
        verls.load_fsdp_model_to_gpu(module)
    # Upstream's code inside merges what is already merged, and restores the merged weights.
    with verls.merged_lora_context(module, backup_adapters=True):
        tensors = tensors_of_the_model()
        parameters = {_memory(parameter) for parameter in module.parameters()}
        for name, tensor in tensors:
            # On one rank, in the dtype that is sent, the tensor is the parameter itself: a caller that collects the
            # tensors must not hold the parameters.
            yield name, tensor.clone() if _memory(tensor) in parameters else tensor


def _memory(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage().data_ptr())
