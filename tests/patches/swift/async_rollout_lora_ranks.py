"""With which adapter ms-swift's engine for rollouts asks vLLM's asynchronous engine to sample.

``--out FOLDER``, with a release of ms-swift on sys.path. Real are ``GRPOVllmEngine`` with ``async_infer``,
``infer_async`` and all that they call, ``VllmEngine``, and the scheduler of multi-turn rollouts. Ours are the engine of
vLLM, whose completions say which weights they are from (vllm_for_swift.py), the template, and the set-up of ms-swift's
engine, which would load a model.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from types import SimpleNamespace
from typing import Any

from rlhf_patches.proving import states
from tests.harness.vllm_for_swift import AsyncLLM, LoRARequest

NAME = "swift-async-rollout-lora"
LOADED, LEARNED = 111, 7  # the number that 4.2 and later load an adapter under; before that any is


@functools.cache
def package() -> str:
    """Where the release has its engines."""
    try:
        importlib.import_module("swift.infer_engine.grpo_vllm_engine")
    except ModuleNotFoundError:  # before 4.0
        return "swift.llm.infer.infer_engine"
    return "swift.infer_engine"


def engine_class(rollouts: bool = True) -> Any:
    name, module = ("GRPOVllmEngine", "grpo_vllm_engine") if rollouts else ("VllmEngine", "vllm_engine")
    return getattr(importlib.import_module(f"{package()}.{module}"), name)


class Template:
    """Of a request, its text's letters; of a completion, its first token."""

    template_meta = SimpleNamespace(stop_words=[])
    agent_template = None

    def set_mode(self, mode: str) -> None:
        pass

    def encode(self, request: Any, return_template_inputs: bool) -> dict[str, Any]:
        text = request.messages[-1]["content"]
        return {"input_ids": [ord(letter) for letter in text], "template_inputs": SimpleNamespace(images=[])}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(*tokens[:1])

    decode_generate_ids = decode

    def _get_response_prefix(self, inputs: Any) -> str:
        return ""

    def skip_stop_tokens(self, tokens: list[int]) -> list[int]:
        return tokens


def make_engine(rollouts: bool = True, lora: bool = True, below: Any = None) -> Any:
    engine: Any = object.__new__(engine_class(rollouts))
    engine.engine, engine.template = below or AsyncLLM(), Template()
    engine.default_template = engine.template  # before 4.0
    engine.use_async_engine, engine.enable_lora = True, lora
    engine.default_adapter_request = engine.reasoning_parser = engine.task_type = None
    engine.generation_config = SimpleNamespace(
        stop=[], temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=1.0
    )
    engine._adapters_pool, engine.max_model_len, engine.max_tokens_offset, engine.model_name = {}, 64, 0, "policy"
    engine._get_stop_words = engine._get_stop_token_ids = lambda words: words
    return engine


def protocol() -> Any:
    """What has the classes of requests."""
    return importlib.import_module("swift.llm" if package().startswith("swift.llm") else "swift.infer_engine.protocol")


def request_of(text: str) -> Any:
    return protocol().RolloutInferRequest(messages=[{"role": "user", "content": text}], uuid=f"uuid-{text}")


def config_of() -> Any:
    return protocol().RequestConfig(max_tokens=4)


def said(response: Any) -> int:
    """The token of a completion."""
    return int(getattr(response, "response", response).choices[0].message.content)


async def affects_rollouts(engine: Any, texts: tuple[str, ...] = ("a", "b")) -> list[int]:
    found = await engine.async_infer([request_of(text) for text in texts], config_of(), use_tqdm=False)
    found = await found if asyncio.iscoroutine(found) else found  # 3.10.0 to 3.10.2
    return [said(each) for each in found]


async def of_turns(engine: Any) -> int:
    """Of a scheduler that has two turns with the engine."""
    try:
        module: Any = importlib.import_module("swift.rollout.multi_turn")
    except ModuleNotFoundError:  # before 4.0
        module = importlib.import_module("swift.plugin.multi_turn")

    class TwoTurns(module.MultiTurnScheduler):
        tokenizer = engine.template  # 4.6 decodes what it has sampled

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages.append({"role": "user", "content": "more"})
            return {"infer_request": infer_request}

    scheduler = TwoTurns(infer_engine=engine, max_turns=2)
    output = await scheduler.run(request_of("a"), config_of())
    return said(output)


async def observe_async() -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine = make_engine()
    found["before the first update"] = await affects_rollouts(engine)
    engine.engine.adapters[LOADED] = LEARNED
    found["after an update"] = await affects_rollouts(engine)
    engine.engine.adapters[LOADED] = LEARNED + 1
    found["after another"] = await affects_rollouts(engine)
    found["in turns"] = await of_turns(engine)
    found["requests"] = [list(each) for each in engine.engine.requests]

    engine.engine.adapters[5] = 55
    named = LoRARequest("five", 5, "path")
    found["one that is named"] = said(await engine.infer_async(request_of("a"), config_of(), adapter_request=named))

    others = {"another engine": make_engine(rollouts=False), "no LoRA": make_engine(lora=False)}
    if "infer_async" not in vars(engine_class()):  # 4.5 and later ask every engine
        others["vLLM's first engine"] = make_engine(below=First())
    for name, other in others.items():
        other.engine.adapters[LOADED] = LEARNED
        found[name] = said(await other.infer_async(request_of("a"), config_of()))
        found[f"{name}, asked"] = other.engine.asked
    return found


class First(AsyncLLM):
    """As vLLM's asynchronous engine was at first: it cannot be asked."""

    list_loras = None  # type: ignore[assignment]


def observe() -> dict[str, Any]:
    return asyncio.run(observe_async())


def main() -> None:
    options = states.parser().parse_args()
    engine_class()
    states.report(NAME, observe, options.out)
