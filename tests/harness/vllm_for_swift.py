"""What ms-swift uses of vLLM, and an engine that says which weights a completion is from.

`install()` lets ms-swift import vLLM where there is none, as absent_packages.py does it; of what it then uses, the
classes here stand for vLLM's. Their semantics were read in vLLM 0.11: `LoRARequest` is a struct, `AsyncLLM.list_loras`
is awaited, `generate` is an asynchronous generator, and a request for an adapter that is not loaded reads its path.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec

from tests.harness import absent_packages


class LoRARequest(msgspec.Struct):
    """Of ``vllm.lora.request``."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class SamplingParams:
    """Of ``vllm``: whatever it is made with."""

    n = seed = None

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


class StatelessProcessGroup:
    """Of ``vllm.distributed.utils``: ms-swift wraps `create` when it is imported."""

    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> None:
        raise NotImplementedError("there is no group of a stand-in's")


class LRUCacheWorkerLoRAManager:
    """Of ``vllm.lora.worker_manager``: ms-swift wraps `_load_adapter` when its rollout server is imported."""

    def _load_adapter(self, lora_request: LoRARequest) -> None:
        raise NotImplementedError("there is no adapter of a stand-in's")


def install() -> None:
    """Let ms-swift import vLLM. Where the real one is installed, nothing is done."""
    if "vllm" not in absent_packages.install(("vllm",)):
        return
    for module, stand_in in (
        ("vllm", SamplingParams),
        ("vllm.lora.request", LoRARequest),
        ("vllm.distributed.utils", StatelessProcessGroup),
        ("vllm.lora.worker_manager", LRUCacheWorkerLoRAManager),
    ):
        setattr(importlib.import_module(module), stand_in.__name__, stand_in)
    sys.modules["vllm.transformers_utils.tokenizer_group"] = None  # type: ignore[assignment]  # it has none since 0.11


BASE = 0
"""The token that base weights complete every prompt with; an adapter's is what was loaded under its number."""


class AsyncLLM:
    """In place of vLLM's asynchronous engine.

    Attributes:
        adapters: of each adapter that is loaded, by its number, the token that it completes every prompt with.
        requests: of each request, its number, prompt and adapter's number, None for the base.
        asked: how often it was asked for its adapters.
    """

    def __init__(self) -> None:
        self.adapters: dict[int, int] = {}
        self.requests: list[tuple[str, list[int], int | None]] = []
        self.asked = 0

    async def list_loras(self) -> set[int]:
        self.asked += 1
        return set(self.adapters)

    async def generate(
        self, prompt: dict[str, Any], sampling_params: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[SimpleNamespace]:
        number = lora_request and lora_request.lora_int_id
        self.requests.append((request_id, prompt["prompt_token_ids"], number))
        if number is not None and number not in self.adapters:
            raise ValueError(f"No adapter found for {lora_request.lora_path}")
        token = BASE if number is None else self.adapters[number]
        output = SimpleNamespace(index=0, token_ids=[token], logprobs=None, finish_reason="stop")
        yield SimpleNamespace(
            request_id=request_id, prompt_token_ids=prompt["prompt_token_ids"], outputs=[output], finished=True
        )
