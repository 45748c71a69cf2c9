"""The samples of the workers of ms-swift's rollout server.

``--out FOLDER``, with a release of ms-swift on sys.path. The worker's loop, ``get_infer_engine``, and the server's
``infer``, which communicates with its workers through pipes, are real. The engine is ours, vLLM's and ms-swift's in
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.proving import states

NAME = "swift-rollout-worker-seed"
VOCABULARY, TOKENS, SAMPLES = 32, 8, 8
TIMEOUT = 30  # seconds; a worker that has not answered by then hangs


def server() -> Any:
    return importlib.import_module("swift.llm.infer.rollout")


class Engine:
    """Samples every prompt from one distribution.

    As in vLLM's code (0.10.0 to 0.31.0): its worker seeds torch's generator with the engine's seed, by default 0, and
    draws each step's noise from it for all requests at once; a request with a seed has its own generator.
    """

    of: type  # the real engine, whose signature is used

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = inspect.signature(self.of).bind(*args, **kwargs).arguments
        seed = settings.get("seed")
        if seed is None:  # ms-swift's VllmEngine: it overrides the engine's keywords
            seed = settings["engine_kwargs"].get("seed")
        self.seed, self.engine = seed, self
        self.generator = torch.Generator().manual_seed(seed or 0)
        self.weights = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(1))

    def seeded(self) -> int | None:
        return self.seed

    def infer(self, infer_requests: list[Any], request_config: Any, use_tqdm: Any = None) -> list[list[int]]:
        noise = torch.empty(TOKENS, len(infer_requests), VOCABULARY).exponential_(generator=self.generator)
        if request_config.seed is not None:
            for place in range(len(infer_requests)):
                own = torch.Generator().manual_seed(request_config.seed + place)
                noise[:, place].exponential_(generator=own)
        samples: list[list[int]] = (self.weights / noise).argmax(-1).T.tolist()
        return samples


class Arguments(SimpleNamespace):
    """Any other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def get_template(self, *_: Any) -> None:
        pass

    _import_external_plugins = _init_custom_register = get_template

    def get_vllm_engine_kwargs(self) -> dict[str, Any]:
        return {"engine_kwargs": dict(self.vllm_engine_kwargs or {})}


@contextlib.contextmanager
def serving(workers: int, given: dict[str, Any] | None = None) -> Iterator[Any]:
    """The server, while its workers run."""
    sizes = {f"{prefix}{kind}_parallel_size": 1 for prefix in ("", "vllm_") for kind in ("tensor", "pipeline")}
    args = Arguments(**sizes, model="a model", infer_backend="vllm", vllm_enable_lora=False, vllm_engine_kwargs=given)
    args.data_parallel_size = args.vllm_data_parallel_size = workers
    args.vllm_use_async_engine = args.use_async_engine = args.use_gym_env = False
    real: Any = object.__new__(server().SwiftRolloutDeploy)
    real.args, real.use_async_engine, real.num_connections, real.connections = args, False, workers, []
    threads = []
    for number in range(workers):
        ours, theirs = Pipe()
        threads.append(threading.Thread(target=server().llm_worker, args=(args, number, 0, theirs), daemon=True))
        threads[-1].start()
        assert ours.poll(TIMEOUT)
        assert ours.recv() == {"status": "ready"}
        real.connections.append(ours)
    try:
        yield real
    finally:
        for connection, thread in zip(real.connections, threads, strict=True):
            connection.send({"type": "shutdown"})
            thread.join(TIMEOUT)
            assert not thread.is_alive()


def rollouts(workers: int, given: dict[str, Any] | None = None, seed: int | None = None) -> dict[str, Any]:
    """Two rollouts of a group, and each worker's seed."""
    found: dict[str, Any] = {"seeds": []}
    with serving(workers, given) as real:
        for connection in real.connections:
            connection.send({"type": "call", "method": "seeded"})
            assert connection.poll(TIMEOUT)
            found["seeds"].append(connection.recv())
        requests = [{"messages": [{"role": "user", "content": "a prompt"}]}] * SAMPLES
        found["samples"] = [asyncio.run(real.infer(requests, SimpleNamespace(seed=seed))) for _ in range(2)]
    return found


def observe() -> dict[str, Any]:
    Engine.of, server().GRPOVllmEngine = server().GRPOVllmEngine, Engine
    try:
        return {
            "2 workers": rollouts(2),
            "a worker for each sample": rollouts(SAMPLES),
            "a seed for the server": rollouts(2, {"seed": 5}),
            "a seed for each request": rollouts(2, seed=3),
            "1 worker": rollouts(1),
        }
    finally:
        server().GRPOVllmEngine = Engine.of


def main() -> None:
    options = states.parser().parse_args()
    server()
    states.report(NAME, observe, options.out)
