"""Replicas of verl's real vLLM servers, started up to vLLM's own code: ``--out FOLDER``.

A stand-in replaces vLLM: `--seed` goes to `torch.manual_seed` when the device is initialized
(`vllm.v1.worker.gpu_worker.Worker.init_device`), and requests without a seed draw from that generator, a whole batch at
a time. Here the device is the CPU. Where vLLM runs within the trainer, the trainer's real `sleep` and `wake_up` switch
between the two generators.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.metadata
import types
from typing import Any

import torch

from rlhf_patches.proving import states

PATCH = "verl-replica-seed"
REPLICAS, ROWS, TOKENS, VOCABULARY = 4, 8, 6, 1000


class Config(types.SimpleNamespace):
    """verl's configuration, with attributes and ``get``."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Parser:
    """A stand-in for vLLM's parser: the command-line arguments that this module reads."""

    def __init__(self, **_: Any) -> None:
        pass

    def add_subparsers(self, **_: Any) -> Parser:
        return self

    def parse_args(self, args: list[str]) -> argparse.Namespace:
        seed = int(args[args.index("--seed") + 1]) if "--seed" in args else 0
        return argparse.Namespace(model_tag=args[1], subparser="serve", seed=seed)


def seed_of(
    replica: int, mode: str = "STANDALONE", node: int = 0, engine: dict[str, Any] | None = None, **settings: Any
) -> int:
    """The seed that `launch_server` starts vLLM with.

    Args:
        engine: `engine_kwargs.vllm`.
        settings: further settings of the configuration.
    """
    servers: Any = importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    servers.FlexibleArgumentParser = Parser
    servers.vllm.entrypoints.cli.serve.cmd_init = list
    servers.ray = types.SimpleNamespace(get=list)  # otherwise it would start a cluster without workers
    kind = getattr(servers.vLLMHttpServer, "__ray_actor_class__", servers.vLLMHttpServer)
    server = object.__new__(kind)
    server.config = Config(
        **{"cudagraph_capture_sizes": None, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "response_length": TOKENS},
        **{"enable_sleep_mode": True, "quantization": None, "quantization_config_file": None, "dtype": "bfloat16"},
        **{"load_format": "dummy", "max_model_len": 64, "max_num_seqs": 8, "enable_chunked_prefill": True},
        **{"max_num_batched_tokens": 64, "enable_prefix_caching": True, "logprobs_mode": None, "enforce_eager": True},
        **{"gpu_memory_utilization": 0.5, "disable_log_stats": True, "tensor_model_parallel_size": 1},
        **{"expert_parallel_size": 1, "enable_rollout_routing_replay": False, "engine_kwargs": {"vllm": engine or {}}},
        prometheus=types.SimpleNamespace(enable=False),
        **settings,
    )
    server.model_config = types.SimpleNamespace(lora_rank=0, trust_remote_code=False, local_path="a model")
    server.replica_rank, server.node_rank, server.nnodes, server.workers = replica, node, 2, []
    server.rollout_mode = servers.RolloutMode[mode]
    seeds = []

    async def started(arguments: argparse.Namespace) -> None:
        seeds.append(arguments.seed)

    server.run_server = server.run_headless = started
    with contextlib.redirect_stdout(None):  # the first replica prints its arguments
        asyncio.run(server.launch_server("127.0.0.1", 1))
    return seeds[0]


def drawn() -> list[list[int]]:
    """A batch of samples of one prompt, token by token, as vLLM draws requests without a seed."""
    probabilities = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [list(row) for row in zip(*(noisy(probabilities) for _ in range(TOKENS)), strict=True)]


def noisy(probabilities: torch.Tensor) -> list[int]:
    noise = torch.empty(ROWS, VOCABULARY, dtype=torch.float64).exponential_()
    return (probabilities / noise).argmax(dim=-1).tolist()


def alone(replica: int) -> list[list[int]]:
    """Samples of a replica in separate processes."""
    torch.manual_seed(seed_of(replica))
    return drawn()


def within_the_trainer(replica: int, asleep_at_first: bool = True) -> list[list[int]]:
    """Samples of a replica whose vLLM runs in the trainer's process."""
    workers: Any = importlib.import_module("verl.workers.engine_workers")
    workers.get_torch_device = lambda: torch
    workers.aggressive_empty_cache = lambda **_: None  # reads the device's memory

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    worker = object.__new__(workers.ActorRolloutRefWorker)
    worker.config = types.SimpleNamespace(rollout=types.SimpleNamespace(free_cache_engine=asleep_at_first))
    worker.rollout = types.SimpleNamespace(release=nothing, resume=nothing, update_weights=nothing)
    engine = types.SimpleNamespace(get_per_tensor_param=lambda: ((), None), to=lambda *_, **__: None)
    worker.actor, worker.base_sync_done = types.SimpleNamespace(engine=engine), True
    # As its init_model does.
    worker.torch_random_states = torch.get_rng_state()
    torch.manual_seed(replica + 1000)
    worker.gen_random_states = torch.get_rng_state()
    torch.set_rng_state(worker.torch_random_states)
    torch.manual_seed(seed_of(replica, "HYBRID"))
    if asleep_at_first:  # AgentLoopManager's first call, with free_cache_engine
        asyncio.run(worker.sleep())
    asyncio.run(worker.wake_up())
    return drawn()


def observe() -> dict[str, Any]:
    replicas = range(REPLICAS)
    found: dict[str, Any] = {
        "seeds": [seed_of(replica) for replica in replicas],
        "a seed": [seed_of(replica, seed=42) for replica in replicas],
        "colocated": [seed_of(replica, "COLOCATED") for replica in replicas],
        "hybrid": [seed_of(replica, "HYBRID", seed=42) for replica in replicas],
        "alone": [alone(replica) for replica in replicas],
    }
    if importlib.metadata.version("verl") == "0.7.0":
        found |= {
            "again": [alone(replica) for replica in replicas],
            "no seed": [seed_of(replica, seed=None) for replica in replicas],
            "nodes": [seed_of(1, node=node) for node in range(2)],
            "the user's": [seed_of(replica, engine={"seed": 7}) for replica in replicas],
            "within": [within_the_trainer(replica) for replica in replicas],
            "awake": [within_the_trainer(replica, asleep_at_first=False) for replica in replicas],
        }
    return found


def main() -> None:
    states.report(PATCH, observe, states.parser().parse_args().out)


if __name__ == "__main__":
    main()
