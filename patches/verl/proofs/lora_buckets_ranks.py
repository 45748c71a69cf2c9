"""Weights through verl's real extension of vLLM's worker, a few buckets at a time: ``--out FOLDER``.

This worker replaces vLLM: its `add_lora` loads an adapter with a new id, and ignores an adapter with a known id
(`vllm.lora.worker_manager.LRUCacheWorkerLoRAManager.add_adapter`); `remove_lora` forgets the id. A receiver that fills
one buffer repeatedly, like verl's, replaces ZeroMQ.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch

from rlhf_patches.proving import states

PATCH = "verl-lora-buckets"
LAYERS, SIZE = 6, 4


def tensors(number: int) -> dict[str, torch.Tensor]:
    """The tensors of an update."""
    return {f"layers.{layer}": torch.full((SIZE,), float(10 * number + layer)) for layer in range(LAYERS)}


class Worker:
    """A stand-in for vLLM's worker."""

    def __init__(self) -> None:
        self.adapters: dict[int, dict[str, torch.Tensor]] = {}
        self.loaded: list[list[str]] = []
        self.device, self.local_rank = torch.device("cpu"), 0
        self._is_qat_model = self._is_modelopt_qat = False
        self.model_runner = types.SimpleNamespace(
            model=types.SimpleNamespace(load_weights=lambda weights: self.loaded.append([name for name, _ in weights])),
            vllm_config=types.SimpleNamespace(speculative_config=None, quant_config=None, model_config=None),
        )

    def add_lora(self, request: Any) -> bool:
        if request.lora_int_id in self.adapters:
            return False
        # vLLM copies them to its own memory.
        self.adapters[request.lora_int_id] = {name: each.clone() for name, each in request.lora_tensors.items()}
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return self.adapters.pop(lora_id, None) is not None


def received(tensors: dict[str, torch.Tensor], per_bucket: int) -> type:
    """A receiver of tensors, ``per_bucket`` at once, in one buffer."""

    class Receiver:
        def __init__(self, **_: Any) -> None:
            self.buffer = torch.zeros(per_bucket * max(tensor.numel() for tensor in tensors.values()))

        def receive_weights(self, on_bucket_received: Any) -> None:
            left = list(tensors.items())
            while left:
                bucket, left = left[:per_bucket], left[per_bucket:]
                given, used = [], 0
                for name, tensor in bucket:
                    view = self.buffer[used : used + tensor.numel()].view(tensor.shape)
                    view.copy_(tensor)
                    given.append((name, view))
                    used += tensor.numel()
                on_bucket_received(given)
            self.buffer.fill_(float("nan"))

    return Receiver


def extended() -> type:
    """The worker with verl's extension; methods that need vLLM are overridden."""
    utils: Any = importlib.import_module("verl.workers.rollout.vllm_rollout.utils")
    loader: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    loader.process_weights_after_loading = lambda *_: None
    utils.patch_vllm_moe_model_weight_loader = lambda _: None
    utils.is_fp8_model = lambda _: False
    utils.TensorLoRARequest = lambda **fields: types.SimpleNamespace(**fields)  # vLLM's, with two more fields
    utils.vLLMColocateWorkerExtension._get_zmq_handle = lambda _: ""
    return type("Extended", (Worker, utils.vLLMColocateWorkerExtension), {"__new__": lambda cls: object.__new__(cls)})


def update(worker: Any, tensors: dict[str, torch.Tensor], per_bucket: int, **settings: Any) -> None:
    """Send a worker tensors."""
    transfer: Any = importlib.import_module("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
    transfer.BucketedWeightReceiver = received(tensors, per_bucket)
    worker.update_weights_from_ipc(**settings)


def observe() -> dict[str, Any]:
    """For each case, the engine's adapter after two updates; for the base model, the loaded names by bucket."""
    kind = extended()
    found: dict[str, Any] = {}
    for name, per_bucket in {"one bucket": LAYERS, "two": LAYERS // 2, "four": 2}.items():
        worker = kind()
        for number in (1, 2):
            update(worker, tensors(number), per_bucket, peft_config={"r": 4}, base_sync_done=True)
        (adapter,) = worker.adapters.values()
        right = tensors(2)
        found[name] = {
            "layers": sorted(adapter),
            "right": [layer for layer in sorted(adapter) if torch.equal(adapter[layer], right[layer])],
        }
    for name, settings in {"full": {}, "base": {"peft_config": {"r": 4}}}.items():
        worker = kind()
        update(worker, tensors(1), 4, **settings)
        found[name] = {"loaded": worker.loaded, "adapters": len(worker.adapters)}
    return found


def main() -> None:
    states.report(PATCH, observe, states.parser().parse_args().out)


if __name__ == "__main__":
    main()
