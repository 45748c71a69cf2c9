"""Requests through verl's real `vLLMHttpServer.generate` to an engine that draws as vLLM does: ``--out FOLDER``.

Groups arrive as the default V1 trainer sends them (`AgentLoopWorkerTQ._run_prompt`, the agent loop, and the client),
and with the ids by which the older trainer names samples.

A stand-in replaces vLLM: a request with a seed uses its own generator with this seed, all others share one generator
(`vllm.v1.sample`).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import types
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import torch

from rlhf_patches.proving import states

PATCH = "verl-rollout-seed"
TOKENS, VOCABULARY = 8, 1000


class Parameters(types.SimpleNamespace):
    """A stand-in for vLLM's ``SamplingParams``."""

    prompt_logprobs = None


class Engine:
    """Draws tokens that depend on the prompt; records the seeds."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []
        self._shared = torch.Generator().manual_seed(0)

    async def generate(self, *, prompt: Any, sampling_params: Parameters, **_: Any) -> AsyncIterator[Any]:
        seed = getattr(sampling_params, "seed", None)
        self.seeds.append(seed)
        generator = self._shared if seed is None else torch.Generator().manual_seed(seed)
        probabilities = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(sum(prompt["prompt_token_ids"])))
        drawn = torch.multinomial(probabilities, TOKENS, replacement=True, generator=generator).tolist()
        yield types.SimpleNamespace(
            outputs=[types.SimpleNamespace(token_ids=drawn, logprobs=None, finish_reason="length")],
            num_cached_tokens=0,
            prompt_logprobs=None,
            metrics=None,
        )


def make_server(replica: int = 0, deterministic: bool = True, steps: int | None = 1) -> Any:
    servers = importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    servers.SamplingParams, servers.TokensPrompt = Parameters, dict  # type: ignore[attr-defined]
    server = object.__new__(servers.vLLMHttpServer)

    class Config(types.SimpleNamespace):
        def get(self, name: str, default: Any = None) -> Any:
            return getattr(self, name, default)

    server.config = Config(
        full_determinism=deterministic,
        seed=42,
        n=8,
        max_model_len=64,
        prompt_length=32,
        response_length=TOKENS,
        enable_rollout_routing_replay=False,
        mtp=None,
    )
    server.model_config = types.SimpleNamespace(processor=None, lora_rank=0, lora={})
    server.replica_rank, server.global_steps, server.engine = replica, steps, Engine()
    server._disaggregation_role, server._pd_decode_peers = None, []
    server._admitting = 0

    async def admitted(_: str) -> None:
        server._admitting += 1

    server._park_until_admitted = admitted  # of 0.9.1: waits while weights are updated
    return server


def asked(server: Any, requests: list[str], prompt: tuple[int, ...] = (1, 2, 3), **parameters: Any) -> dict[str, Any]:
    """The returned tokens for these requests of one prompt, and the seeds that the engine received."""

    async def all_of_them() -> list[list[int]]:
        found = [
            await server.generate(prompt_ids=list(prompt), sampling_params=dict(parameters), request_id=each)
            for each in requests
        ]
        return [each.token_ids for each in found]

    return {"tokens": asyncio.run(all_of_them()), "seeds": list(server.engine.seeds)}


GROUP = [f"det-{place}" for place in range(8)]


class Client(types.SimpleNamespace):
    """A client's handle of one server, which receives copies of the requests."""

    def __init__(self, server: Any) -> None:
        async def remote(**request: Any) -> Any:
            return await server.generate(**copy.deepcopy(request))

        super().__init__(generate=types.SimpleNamespace(remote=remote))


def asked_by_v1(server: Any, *, tools: bool = False, prompt: tuple[int, ...] = (1, 2, 3), **row: Any) -> dict[str, Any]:
    """The same for one row of a data set, by the trainer's own worker; ``row`` is the data set's row."""
    worker_module: Any = importlib.import_module("verl.trainer.ppo.v1.agent_loop_tq")
    client_module: Any = importlib.import_module("verl.workers.rollout.llm_server")
    module, name = ("tool_agent_loop", "ToolAgentLoop") if tools else ("single_turn_agent_loop", "SingleTurnAgentLoop")
    loops: Any = importlib.import_module(f"verl.experimental.agent_loop.{module}")
    rollout = types.SimpleNamespace(n=8, full_determinism=server.config.full_determinism, name="vllm")
    client = object.__new__(client_module.LLMServerClient)
    client.config = types.SimpleNamespace(actor_rollout_ref=types.SimpleNamespace(rollout=rollout))
    found: list[list[int]] = []

    class Loop(getattr(loops, name)):  # type: ignore[misc]
        """The release's loop, with a tokenized prompt; it ends at the first answer."""

        rollout_config, server_manager = rollout, client
        tools: ClassVar[dict[str, Any]] = {}
        tool_schemas: tuple[Any, ...] = ()
        tool_parser = types.SimpleNamespace(stop_token_ids=[])
        prompt_length = response_length = 64

        def __init__(self) -> None:
            pass

        async def process_multi_modal_info(self, _: Any) -> dict[str, Any]:
            return {}

        def _get_mm_processor_kwargs(self, *_: Any) -> None:
            return None

        async def ct_build_initial_tokens(self, *_: Any, **__: Any) -> list[int]:
            return list(prompt)

        apply_chat_template = ct_build_initial_tokens
        enable_continuous_token = True

        def _assert_mm_supported(self, *_: Any) -> None: ...

        def build_sglang_video_payload(self, *_: Any) -> None: ...

    async def acquired(*_: Any, **__: Any) -> tuple[str, Any]:
        return "server", Client(server)

    client._acquire_server, client._release_server = acquired, lambda *_, **__: None

    async def looped(self: Any, sampling_params: Any, trajectory: Any, *, trace: bool, **sample: Any) -> None:
        generate = client.generate

        async def answered(*given: Any, **more: Any) -> Any:
            output = await generate(*given, **more)
            found.append(output.token_ids)
            raise Answered

        loop = Loop()
        loop.server_manager = types.SimpleNamespace(generate=answered)
        with contextlib.suppress(Answered):
            await loop.run(sampling_params, **sample)

    async def noted(**_: Any) -> None: ...

    kind = worker_module.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = object.__new__(kind)
    worker.config = client.config
    worker._run_agent_loop = types.MethodType(looped, worker)
    worker_module.tq = types.SimpleNamespace(async_kv_put=noted)
    sample = {"uid": "0", "raw_prompt": [], "global_steps": 1, **row}
    trajectory = {"validate": False, "step": 1, "sample_index": 0, "rollout_n": 0}
    asyncio.run(worker._run_prompt(sample, {"temperature": 1.0}, trajectory))
    return {"tokens": found, "seeds": list(server.engine.seeds)}


class Answered(Exception):
    """The engine has answered, and the rest of the loop is not needed."""


def observe() -> dict[str, Any]:
    return {
        "V1": asked_by_v1(make_server(), index=3),
        "V1 again": asked_by_v1(make_server(), index=3),
        "V1, another row": asked_by_v1(make_server(), index=4),
        "V1, another prompt": asked_by_v1(make_server(), prompt=(1, 2, 4), index=3),
        "V1, with tools": asked_by_v1(make_server(), tools=True, index=3),
        "V1, not deterministic": asked_by_v1(make_server(deterministic=False), index=3),
        "a group": asked(make_server(), GROUP),
        "again": asked(make_server(), GROUP),
        "another step": asked(make_server(steps=2), GROUP),
        "before the first update": asked(make_server(steps=None), GROUP),
        "another replica": asked(make_server(replica=1), GROUP),
        "another turn": asked(make_server(), GROUP, (1, 2, 3, 4)),
        "a caller's seed": asked(make_server(), GROUP, seed=7),
        "other ids": asked(make_server(), [f"{place:032x}" for place in range(8)]),
        "not deterministic": asked(make_server(deterministic=False), GROUP),
    }


def main() -> None:
    states.report(PATCH, observe, states.parser().parse_args().out)


if __name__ == "__main__":
    main()
