"""What verl's real worker sends of a small model with LoRA, and what its other side makes of it: ``--out FOLDER``.

The engine and the model are those of merged_lora_ranks.py, on one rank; what stands for NCCL keeps the tensors.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_patches.patches.verl.proofs import merged_lora_ranks as lora
from rlhf_patches.proving import states

NAME = "verl-disaggregated-lora"
CASES = {
    "adapter": lora.Case(merge=False),
    "adapter, fsdp1": lora.Case(version=1, merge=False),
    "merged": lora.Case(),
    "merged, fsdp1": lora.Case(version=1),
    "no LoRA": lora.Case(lora=False, merge=False),
}


class Sent:
    """In place of a checkpoint engine, and of the server's side."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.received: list[str] = []

    async def send_weights(self, weights: Any, **_: Any) -> None:
        self.tensors = {name: tensor.detach().clone() for name, tensor in weights}

    def receive_weights(self, **_: Any) -> Any:
        return self.tensors.items()

    async def update_weights(self, weights: Any, **settings: Any) -> None:
        assert dict(weights).keys() == self.tensors.keys()
        self.received = sorted(settings)


def observe(case: lora.Case) -> dict[str, Any]:
    """How far what is sent is from the merged model, and from the base model; and what comes with it."""
    workers: Any = importlib.import_module("verl.workers.engine_workers")
    base_module: Any = importlib.import_module("verl.checkpoint_engine.base")
    model = lora.make_model(case)
    exact, base = (copy.deepcopy(model).double() for _ in range(2))
    if case.lora:
        exact, base = exact.merge_and_unload(), base.unload()
    worker = object.__new__(workers.ActorRolloutRefWorker)
    worker.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="nccl")))
    worker.actor = SimpleNamespace(engine=lora.make_engine(case, model))
    worker.actor.engine.model_config.hf_config = SimpleNamespace(model_type="qwen2")
    worker.checkpoint_engine = sent = Sent()
    asyncio.run(worker.update_weights(global_steps=1))
    other = object.__new__(base_module.CheckpointEngineWorker)
    other.checkpoint_engine = other.server_adapter = sent
    asyncio.run(other.update_weights(global_steps=1))
    given = {name.replace(".base_layer", ""): tensor.double() for name, tensor in sent.tensors.items()}

    def distance(of: Any) -> float:
        right = of.state_dict()
        return max(float((given[name] - right[name]).norm() / right[name].norm()) for name in given if name in right)

    return {
        "from merged": distance(exact),
        "from the base": distance(base),
        "found": len({*given} & {*exact.state_dict()}) / len(exact.state_dict()),
        "of the adapter": [name for name in given if "lora_" in name],
        "received with": sent.received,
    }


def main() -> None:
    out = states.parser().parse_args().out
    torch.distributed.init_process_group("gloo")
    engines: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    # A GPU's.
    torch.cpu.empty_cache = torch.cuda.empty_cache = lambda: None
    engines.log_gpu_memory_usage = lambda *args, **kwargs: None
    states.report(NAME, lambda: {name: observe(case) for name, case in CASES.items()}, out)
