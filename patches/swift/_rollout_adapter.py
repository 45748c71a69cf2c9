"""The adapter with which ms-swift's asynchronous rollouts should be sampled."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import rlhf_patches

_NAME = "swift-async-rollout-lora"


async def current_adapter(engine: Any, adapter_request: Any) -> Any:
    """The adapter that the trainer has loaded into GRPO's engine, as ``GRPOVllmEngine.infer`` requests it.

    Args:
        engine: a ``VllmEngine`` with vLLM's asynchronous engine.
        adapter_request: the caller's request, or None.

    Returns:
        ``adapter_request``, or a ``LoRARequest`` if it is None, the engine is GRPO's, and an adapter is loaded.
    """
    module = _rollout_engines_module(engine)
    if adapter_request or not engine.enable_lora or module is None:
        rlhf_patches.decided(_NAME, False)
        return adapter_request
    list_loras = getattr(engine.engine, "list_loras", None)  # vLLM's first asynchronous engine does not have it
    if list_loras is None:
        return adapter_request
    loaded = list_loras()
    if inspect.isawaitable(loaded):
        loaded = await loaded  # waits: for the engine that the request itself goes to
    current = _request(module, sorted(loaded))
    rlhf_patches.decided(_NAME, current is not None)
    return current


def _rollout_engines_module(engine: Any) -> Any:
    """The module that defines the class of GRPO's engine; None for another engine."""
    # known: ms-swift's class, by its name; releases have it in different modules
    engines = (each for each in type(engine).__mro__ if each.__name__ == "GRPOVllmEngine")
    return next((sys.modules.get(each.__module__) for each in engines), None)


def _request(module: Any, loaded: list[int]) -> Any:
    number = getattr(module, "VLLM_LORA_INT_ID", None)  # 4.2 and later always use this id
    if number is not None:
        if number not in loaded:
            return None
        return module.LoRARequest(lora_name=module.VLLM_LORA_NAME, lora_int_id=number, lora_path=module.VLLM_LORA_PATH)
    if not loaded:
        return None
    # The engine has room for one.
    return module.LoRARequest(lora_name=str(loaded[0]), lora_int_id=loaded[0], lora_path="dummy_lora_path")
