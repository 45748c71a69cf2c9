"""NeMo-RL's own `AsyncTrajectoryCollector` of one tag over some weight updates: before, after, and reverted.

``--out FOLDER`` on one rank, with NeMo-RL's file on sys.path. What stands for vLLM keeps, for each prefix, the weights
that have computed it, until it is reset, which vLLM does not do while a request runs (``BlockPool.reset_prefix_cache``
of 0.20.2). Of the class only ``__init__`` does not run here: it wants a data loader and workers.
"""

from __future__ import annotations

import importlib
import threading
from types import SimpleNamespace
from typing import Any

import ray.cloudpickle

from rlhf_patches.proving import states
from tests.harness import slime_clone

slime_clone.install("nemo_rl", "torchdata")

NAME = "nemo-rl-async-prefix-cache"
PACKAGE = "nemo_rl.algorithms.async_utils"
UPDATES = 3
CASES: dict[str, dict[str, Any]] = {
    "waits": {},
    "waits, with the flag": {"recompute_kv_cache_after_weight_updates": True},
    "fails": {"fails": True},
    # As released.
    "in flight": {"in_flight_weight_updates": True},
    "in flight, with the flag": {
        "in_flight_weight_updates": True,
        "recompute_kv_cache_after_weight_updates": True,
    },
    "megatron": {"backend": "megatron"},
}


class Engine:
    """Generation, with a prefix cache."""

    def __init__(self, fails: bool = False):
        self.weights, self.fails, self.running = 0, fails, 0
        self.computed_by: dict[str, int] = {}
        self.resets: list[str] = []

    def generate(self, prompt: str) -> int:
        """The weights that have computed what the prompt is read from."""
        return self.computed_by.setdefault(prompt, self.weights)

    def invalidate_kv_cache(self) -> bool:
        if self.fails:
            raise RuntimeError("of a worker")
        self.resets.append("running" if self.running else "idle")
        if not self.running:
            self.computed_by.clear()
        return not self.running


def collector_class() -> Any:
    module: Any = importlib.import_module(PACKAGE)
    if not hasattr(module, "__file__") or not module.__file__:  # since 0.7.0 a package
        module = importlib.import_module(f"{PACKAGE}.trajectory_collector")
    return module.AsyncTrajectoryCollector.__ray_metadata__.modified_class


def config(is_0_7: bool, backend: str = "vllm", **settings: Any) -> Any:
    engine = {"async_engine": True}
    generation = {"backend": backend, "vllm_cfg": engine, "mcore_generation_config": engine}
    whole = {"grpo": {"async_grpo": settings}, "policy": {"generation": generation}}
    return type("MasterConfig", (), whole) if is_0_7 else whole


def run(fails: bool = False, **settings: Any) -> dict[str, Any]:
    made = collector_class()
    collector = object.__new__(made)
    engine = collector.policy_generation = Engine(fails)
    collector.master_config = config(made.__module__.endswith("trajectory_collector"), **settings)
    flags = ("in_flight_weight_updates", "recompute_kv_cache_after_weight_updates")
    collector.async_config = SimpleNamespace(**{flag: settings.get(flag, False) for flag in flags})  # main's
    collector._refit_pause_cleared = threading.Event()
    collector._threads_lock, collector._inflight_threads = threading.Lock(), set()
    found = [engine.generate("the same prompt")]
    for _ in range(UPDATES):
        engine.running = int(settings.get("in_flight_weight_updates", False))
        collector.prepare_for_refit()
        assert not collector._refit_pause_cleared.is_set()
        engine.weights += 1
        collector.resume_after_refit()
        assert collector._refit_pause_cleared.is_set()
        found.append(engine.generate("the same prompt"))
    return {"computed by": found, "resets": engine.resets}


def observe() -> dict[str, Any]:
    found: dict[str, Any] = {name: run(**settings) for name, settings in CASES.items()}
    sent = ray.cloudpickle.dumps(collector_class())
    assert b"invalidate_kv_cache" in sent, "the class itself, not its name"
    found["what is sent names us"] = b"rlhf_patches" in sent
    return found


def main() -> None:
    collector_class()
    states.report(NAME, observe, states.parser().parse_args().out)
