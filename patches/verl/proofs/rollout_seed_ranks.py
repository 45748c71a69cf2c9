"""Requests through verl's real `vLLMHttpServer.generate` to an engine that draws as vLLM does: ``--out FOLDER``.

vLLM itself is not here. Its part is small: a request whose parameters have a seed is drawn from a generator of its own
that begins with it, any other from one that they share (`vllm.v1.sample`).
"""

from __future__ import annotations

import asyncio
import importlib
import types
from collections.abc import AsyncIterator
from typing import Any

import torch

from rlhf_patches.proving import states

PATCH = "verl-rollout-seed"
TOKENS, VOCABULARY = 8, 1000


class Parameters(types.SimpleNamespace):
    """vLLM's ``SamplingParams``, as far as they are read."""

    prompt_logprobs = None


class Engine:
    """Draws tokens that depend on the prompt; keeps the seeds."""

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

    server._park_until_admitted = admitted  # 0.9.1's, which waits while weights are updated
    return server


def asked(server: Any, requests: list[str], prompt: tuple[int, ...] = (1, 2, 3), **parameters: Any) -> dict[str, Any]:
    """The tokens that come back for these requests of one prompt, and the seeds that the engine was given."""

    async def all_of_them() -> list[list[int]]:
        found = [
            await server.generate(prompt_ids=list(prompt), sampling_params=dict(parameters), request_id=each)
            for each in requests
        ]
        return [each.token_ids for each in found]

    return {"tokens": asyncio.run(all_of_them()), "seeds": list(server.engine.seeds)}


GROUP = [f"det-{place}" for place in range(8)]


def observe() -> dict[str, Any]:
    return {
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
