"""The answers of ms-swift's rollout server after a failed weight update.

``--out FOLDER``, with a release of ms-swift on sys.path. The loops of the server's workers and the server's ``infer``
and ``reset_prefix_cache`` are real, and communicate through a pipe. The engine in the worker is ours, in place of
vLLM's: its `collective_rpc` raises the errors of a vLLM worker.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import threading
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

from rlhf_patches.proving import states

NAME = "swift-rollout-update-failed"
CONFIG = SimpleNamespace(seed=None)
TIMEOUT = 30  # seconds; a worker that has not answered by then hangs


@functools.cache
def server() -> Any:
    try:
        return importlib.import_module("swift.pipelines.infer.rollout")
    except ModuleNotFoundError:  # before 4.0
        return importlib.import_module("swift.llm.infer.rollout")


class Engine:
    """ms-swift's engine and vLLM's in one. Its completions are the number of updates of its weights."""

    def __init__(self) -> None:
        self.engine, self.version = self, 0

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[str]:
        if method.startswith(("update_", "process_")):
            if "bad" in args:
                raise KeyError("model.norm.weight")
            self.version += 1
        return [method]

    def reset_prefix_cache(self) -> bool:
        return True

    def reset_mm_cache(self) -> bool:
        raise ValueError("no such cache")

    def infer(self, infer_requests: list[Any], **_: Any) -> list[int]:
        if "bad" in infer_requests:
            raise ValueError("a prompt that is too long")
        return [self.version for _ in infer_requests]


class AsyncEngine(Engine):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__("infer" if name == "async_infer" else name)
        if not inspect.ismethod(found):
            return found

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return found(*args, **kwargs)

        return awaited


class Server:
    """The real server's methods, with workers in threads."""

    def __init__(self, awaited: bool, workers: int) -> None:
        self.real: Any = object.__new__(server().SwiftRolloutDeploy)
        self.real.use_async_engine, self.real.num_connections, self.real.connections = awaited, workers, []
        self.threads = []
        loop = server().llm_worker_entry if awaited else server().llm_worker
        for number in range(workers):
            ours, workers_end = Pipe()
            engine = AsyncEngine() if awaited else Engine()
            options = SimpleNamespace(
                engine=engine,
                get_template=lambda *_: None,
                vllm_tensor_parallel_size=1,
                vllm_data_parallel_size=workers,
            )
            options._import_external_plugins = options._init_custom_register = lambda: None
            thread = threading.Thread(target=loop, args=(options, number, 0, workers_end), daemon=True)
            thread.start()
            assert ours.poll(TIMEOUT)
            assert ours.recv() == {"status": "ready"}
            self.real.connections.append(ours)
            self.threads.append(thread)

    def update(self, method: str, *numbers: int, args: tuple[Any, ...] = ()) -> None:
        for number in numbers or range(len(self.real.connections)):
            kwargs = {"method": method, "args": args}
            self.real.connections[number].send(
                {"type": "fire_and_forget", "method": "collective_rpc", "kwargs": kwargs}
            )

    def ask(self, method: str, *args: Any) -> Any:
        """The server's answer, or its error."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(asyncio.run(getattr(self.real, method)(*args)))
            except Exception as error:
                found.append(f"{type(error).__name__}: {getattr(error, 'detail', error)}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(TIMEOUT)
        return found[0] if found else "hung"

    def close(self) -> bool:
        for connection in self.real.connections:
            connection.send({"type": "shutdown"})
        for thread in self.threads:
            thread.join(TIMEOUT)
        return not any(thread.is_alive() for thread in self.threads)


def one(awaited: bool, workers: int) -> dict[str, Any]:
    made = Server(awaited, workers)
    found: dict[str, Any] = {}
    prompts = ["a", "b"]
    made.update("init_communicator")
    made.update("update_flattened_params", args=("good",))
    found["right"] = made.ask("infer", prompts, CONFIG)
    found["too long"] = made.ask("infer", ["bad", "b"], CONFIG)
    found["after that"] = made.ask("infer", prompts, CONFIG)
    if hasattr(made.real, "reset_mm_cache"):
        found["another call"] = made.ask("reset_mm_cache")
    found["after another call"] = made.ask("infer", prompts, CONFIG)
    made.update("update_flattened_params", workers - 1, args=("bad",))
    made.update("update_flattened_params", args=("good",))
    found["cache"] = made.ask("reset_prefix_cache")
    found["failed"] = made.ask("infer", prompts, CONFIG)
    found["again"] = made.ask("infer", prompts, CONFIG)
    made.update("init_communicator")
    made.update("update_flattened_params", args=("good",))
    found["a new trainer"] = made.ask("infer", prompts, CONFIG)
    made.update("process_weights_after_loading", args=("bad",))
    found["not processed"] = made.ask("infer", prompts, CONFIG)
    found["ended"] = made.close()
    return found


def observe() -> dict[str, Any]:
    deploy = server().SwiftRolloutDeploy
    was = deploy.__dict__["get_infer_engine"], server().get_rollout_engine_type
    deploy.get_infer_engine = staticmethod(lambda args, **_: args.engine)  # it would load vLLM
    server().get_rollout_engine_type = lambda args, engine: engine
    try:
        return {"one worker": one(False, 1), "two workers": one(False, 2), "asynchronous": one(True, 1)}
    finally:
        deploy.get_infer_engine, server().get_rollout_engine_type = was


def main() -> None:
    options = states.parser().parse_args()
    server()
    states.report(NAME, observe, options.out)
